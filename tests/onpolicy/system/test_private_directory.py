"""What a process leaves in temporary directories and shared memory, and who removes it."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onpolicy.system.private_directory import LOCK, PREFIX, SHARED_MEMORY, PrivateDirectory, sweep
from sglang_patches.shared_names import PATTERNS


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """An empty temporary directory."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def shared_memory_of(directory):
    """Files as a server makes them: shared memory, and a semaphore."""
    return [
        SHARED_MEMORY / f"{directory.name}_sgl_shm_mq_1",
        SHARED_MEMORY / f"sem.{directory.name}-abc",
    ]


def test_all_that_carries_the_name_goes_with_the_directory(temporary):
    with PrivateDirectory(PATTERNS) as private:
        directory = private.path
        (directory / "socket").touch()
        (directory / "inner").mkdir()
        files = shared_memory_of(directory)
        for file in files:
            file.touch()
        assert directory.stat().st_mode & 0o077 == 0
    assert not any(file.exists() for file in files)
    assert list(temporary.iterdir()) == []


def test_what_a_directory_inside_records_goes_with_it(temporary, monkeypatch):
    """As of a trainer's rank, whose temporary directory is Ray's: killed, it removes nothing."""
    with PrivateDirectory() as outer:
        monkeypatch.setattr("tempfile.tempdir", str(outer.path))
        inner = PrivateDirectory(PATTERNS).path
        monkeypatch.setattr("tempfile.tempdir", str(temporary))
        files = shared_memory_of(inner)
        for file in files:
            file.touch()
    assert not any(file.exists() for file in files)
    assert list(temporary.iterdir()) == []


OWNER = """
import os, sys
import onpolicy.system.private_directory as it
from sglang_patches.shared_names import PATTERNS
directory = it.PrivateDirectory(PATTERNS).path
for file in sys.argv[1:]:
    (it.SHARED_MEMORY / file.replace("NAME", directory.name)).touch()
print(directory, flush=True)
if os.fork() == 0:
    sys.stdin.read()
"""


def start_owner():
    """A process that owns a directory, and a fork of it, which has the lock too."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, "NAME_x", "sem.NAME-x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": __import__("tempfile").gettempdir()},
    )
    return owner, owner.stdout.readline().strip()


def test_the_directory_of_a_killed_owner_is_swept_once_its_server_is_gone(temporary):
    owner, name = start_owner()
    files = [*temporary.glob(f"{PREFIX}*"), *SHARED_MEMORY.glob(f"*{os.path.basename(name)}*")]
    assert len(files) == 3
    owner.wait()
    sweep()  # the forked process still holds the lock
    assert all(file.exists() for file in files)
    owner.stdin.close()
    owner.stdout.read()  # until it has ended
    sweep()
    assert not any(file.exists() for file in files)


def test_a_socket_is_removed_with_its_directory_once_nobody_listens(temporary):
    address = Path(mkdtemp(dir="/tmp")) / "manager.sock"  # of a length that a socket may have
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        with PrivateDirectory() as directory:
            directory.record_socket(address)
        assert address.exists()
    with PrivateDirectory() as directory:
        directory.record_socket(address)
    assert not address.parent.exists()


def test_directories_that_are_none_of_ours_stay(temporary):
    mine = temporary / f"{PREFIX}of_a_user"
    mine.mkdir()
    (mine / "data").touch()
    elsewhere = temporary / "something"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    sweep()
    assert (mine / "data").exists() and (elsewhere / LOCK).exists()


def test_a_directory_of_another_user_stays_and_names_no_files_of_ours(temporary, monkeypatch):
    theirs, ours = temporary / f"{PREFIX}theirs", SHARED_MEMORY / f"{PREFIX}test_of_ours"
    theirs.mkdir()
    (theirs / LOCK).write_text(f"{PREFIX}test*")
    ours.touch()
    try:
        with monkeypatch.context() as patched:
            patched.setattr("os.geteuid", lambda: theirs.stat().st_uid + 1)
            sweep()
        assert theirs.exists() and ours.exists()
        sweep()  # the control: the same one, ours
        assert not theirs.exists() and not ours.exists()
    finally:
        ours.unlink(missing_ok=True)
