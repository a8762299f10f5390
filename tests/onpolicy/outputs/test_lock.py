"""One run to a directory, however the one before it ended."""

import os
import re
import signal
import subprocess
import sys

import pytest

from onpolicy.errors import ConfigError
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.lock import locked
from onpolicy.system.files import make_private
from tests.support.run_in_memory import make_config

HOLD = """
import sys, time
from pathlib import Path
from onpolicy.outputs.lock import locked
from onpolicy.system.files import make_private
with locked(Path(sys.argv[1]), "--save"):
    {then}
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the directory, and waits until it does."""
    started = []

    def start(then="pass"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD.format(then=then), str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def hold(directory):
    with locked(directory / "run", "--run-dir"):
        pass


def test_the_second_run_is_told_who_is_there(holder, tmp_path):
    process = holder()
    with pytest.raises(ConfigError) as refused:
        hold(tmp_path)
    owner = rf"process {process.pid} on {os.uname().nodename}, since \d{{4}}-\d\d-\d\dT[\d:+-]+,"
    assert re.match(rf"--run-dir=.*/run: {owner} is writing there. Two runs", str(refused.value))


def test_a_directory_is_free_again_when_its_run_ends(tmp_path):
    hold(tmp_path)
    hold(tmp_path)


def test_a_kill_frees_the_directory(holder, tmp_path):
    process = holder()
    process.send_signal(signal.SIGKILL)
    process.wait()
    hold(tmp_path)


def test_a_worker_that_outlives_its_run_holds_nothing(holder, tmp_path):
    process = holder("import os; os.fork() or (os.setsid(), time.sleep(3), os._exit(0))")
    process.kill()
    process.wait()
    hold(tmp_path)


@pytest.mark.parametrize(
    "then",
    [
        'open(sys.argv[1] + "/.lock").close()',
        'with locked(Path(sys.argv[1]), "--run-dir"): pass',
    ],
    ids=["the file is opened once more", "the directory is locked once more"],
)
def test_a_lock_is_kept_when_its_own_process_closes_the_file_once_more(holder, tmp_path, then):
    holder(then)
    with pytest.raises(ConfigError, match="is writing there"):
        hold(tmp_path)


def test_a_lock_that_says_nothing_is_a_lock(holder, tmp_path):
    holder()
    (tmp_path / "run" / ".lock").write_text("")
    with pytest.raises(ConfigError, match="another process is writing there"):
        hold(tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"--run-dir=.*/run: cannot be written \(File exists\)"):
        hold(tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_directory_that_is_made_is_its_owners_alone_and_one_that_was_there_keeps_its_mode(
    tmp_path, umask
):
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    before = os.umask(umask)
    try:
        with locked(tmp_path / "a/b", "--save"), locked(there, "--run-dir"):
            pass
        make_private(tmp_path / "c/logs")
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("a/b", "c/logs", "there")}
    assert modes == {"a/b": 0o700, "c/logs": 0o700, "there": 0o755}


def test_the_group_is_let_in_by_a_flag_alone(tmp_path):
    for can_read, mode in ((False, 0o700), (True, 0o750)):
        run, save = (tmp_path / f"{name}-{can_read}" for name in ("run", "save"))
        config = make_config(tmp_path, run_dir=str(run), save=str(save), group_can_read=can_read)
        with locked(save, "--save"):
            RunDirectory.of(config, None).close()
        assert [path.stat().st_mode & 0o777 for path in (run, save)] == [mode, mode]
