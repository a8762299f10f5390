"""Programs that try to get out of their sandbox; each prints `escaped` where it has."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from onpolicy.agents.tools.python import PythonTool
from onpolicy.errors import ConfigError

SECRET = "the answers of the test set"
FOR_EVER = 1e6
"""Seconds that a program may take which ends by itself, however busy the machine is."""
PYTHON = "/usr/bin/python3" if os.getuid() == 0 else sys.executable
"""Root's programs are nobody's, who may not read what is root's alone."""
SMALL = {"memory": 128 << 20, "num_processes": 6, "file_size": 1 << 20, "files_size": 2 << 20}

ESCAPES = {
    "fork bomb": """
import os
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            import time; time.sleep(60)
        count += 1
    print("escaped")
except OSError as error:
    print("refused", count < 8)
""",
    "memory": """
kept = []
try:
    for _ in range(64):
        kept.append(bytearray(16 << 20))
    print("escaped")
except MemoryError:
    print("refused")
""",
    "one large file": """
try:
    with open("large", "wb") as file:
        for _ in range(8):
            file.write(bytes(1 << 20))
    print("escaped")
except OSError:
    print("refused")
""",
    "all files together": """
try:
    for i in range(8):
        open(f"part{i}", "wb").write(bytes(1 << 20))
    print("escaped")
except OSError:
    print("refused")
""",
    "network": """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=5)
    print("escaped")
except OSError:
    print("refused")
""",
    "a secret beside it": """
try:
    print("escaped", open("SECRET").read())
except OSError:
    print("refused")
""",
    "a link out of its directory": """
import os
try:
    os.symlink("SECRET", "link")
    print("escaped", open("link").read())
except OSError:
    print("refused")
""",
    "Python's own files": """
import os
try:
    open(os.__file__, "a").close()
    print("escaped")
except OSError:
    print("refused")
""",
    "killing others": """
import os, signal
for pid in {os.getppid(), os.getppid() + 1, PARENT} - {os.getpid()}:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print("refused")
""",
    "the environment": """
import os
found = dict(os.environ)
for pid in (PARENT, os.getppid()):
    try:
        found[pid] = open(f"/proc/{pid}/environ").read()
    except OSError:
        pass
print("escaped" if "ONPOLICY_HIDDEN" in str(found) else "refused")
""",
    "new privileges": """
import ctypes, os
libc = ctypes.CDLL(None)
print("escaped" if libc.unshare(0x10000000) == 0 or libc.mount(b"x", b"/work", b"tmpfs", 0, None) == 0
      else "refused")
try:
    os.setuid(os.getuid() + 1)
    print("escaped")
except OSError:
    pass
""",
    "endless output": """
while True:
    print("x" * 4096)
""",
    "ignoring signals": """
import signal, time
for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(60)
""",
    "a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 64)
    time.sleep(1000)
print("refused")
""",
}
FAULTS = {"endless output": "output", "ignoring signals": "time"}
HARMLESS = [
    "one large file", "network", "a secret beside it", "a link out of its directory",
    "the environment",
]  # fmt: skip
"""What may be tried without a sandbox, and must get out then."""


@pytest.fixture
def make_program(tmp_path, monkeypatch):
    monkeypatch.setenv("ONPOLICY_HIDDEN", SECRET)
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        words = {"SECRET": str(secret), "PORT": port, "PARENT": str(os.getpid())}
        yield lambda name: re.sub("SECRET|PORT|PARENT", lambda word: words[word[0]], ESCAPES[name])


def run(tool, code):
    return asyncio.run(tool.run(code))


def make_tool(**limits):
    return PythonTool(**{"time_limit": FOR_EVER, "python": PYTHON, **limits})


@pytest.fixture
def sandbox():
    """What needs bubblewrap is skipped where it is not, or may not make namespaces."""
    try:
        run(make_tool(), "")
    except ConfigError as error:
        pytest.skip(str(error))


def processes():
    return {each.pid for each in psutil.Process().children(recursive=True)}


def begun_since(before):
    """Processes of the whole host that a sandbox left behind: children of ours, or orphans in one."""
    ours = psutil.Process()
    return [
        p
        for p in psutil.process_iter(["cmdline", "ppid"])
        if "main.py" in (p.info["cmdline"] or []) and p.pid not in before
        if p.info["ppid"] == 1 or ours in p.parents()  # those of other tests have theirs
    ]


@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out_of_its_sandbox(sandbox, name, make_program):
    before = {p.pid for p in psutil.process_iter()}
    tool = make_tool(time_limit=2.0 if name == "ignoring signals" else FOR_EVER, **SMALL)
    observation = run(tool, make_program(name))
    assert observation.fault == FAULTS.get(name)
    assert "escaped" not in observation.text
    assert SECRET not in observation.text
    assert len(observation.text) < tool.output + 100
    if name not in FAULTS:
        assert observation.text.startswith("refused")
        assert "False" not in observation.text
    assert begun_since(before) == []
    assert {each for each in processes() if each not in before} == set()


@pytest.mark.parametrize("name", HARMLESS)
def test_without_a_sandbox_programs_get_out(name, make_program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", make_program(name)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.stdout.startswith("escaped"), done


def test_a_program_is_a_program(sandbox):
    tool = make_tool()
    code = "import json\nopen('a', 'w').write('5')\nprint(json.loads(open('a').read()) + 2)"
    assert run(tool, code).text == "7\n"
    failed = run(tool, "print('before', flush=True)\n1 / 0")
    assert failed.fault is None
    assert failed.text.startswith("before\n")
    assert failed.text.endswith("ZeroDivisionError: division by zero\n")
    died = run(tool, "import os\nos.abort()")
    assert (died.text, died.fault) == ("\n[ended by SIGABRT]", "died")
    assert run(tool, "import os\nprint(os.listdir('.'))").text == "['main.py']\n"


def test_what_is_readable_is_read_and_not_written(sandbox):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # tests' own are private
        Path(directory).chmod(0o777)
        Path(directory, "data").write_text("given")
        tool = make_tool(readable=(directory,))
        code = f"print(open('{directory}/data').read())\nopen('{directory}/new', 'w')"
        text = run(tool, code).text
        assert text.startswith("given\n")
        assert "Read-only file system" in text
        assert not Path(directory, "new").exists()


def test_many_at_once_and_one_that_is_given_up(sandbox):
    async def many():
        tool = make_tool()
        runs = [tool.run(f"print({i})") for i in range(6)]
        slow = asyncio.create_task(tool.run("import time; time.sleep(60)"))
        texts = [each.text for each in await asyncio.gather(*runs)]
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        return texts

    before = {p.pid for p in psutil.process_iter()}
    assert asyncio.run(many()) == [f"{i}\n" for i in range(6)]
    assert begun_since(before) == []


def test_a_program_that_writes_while_it_is_being_ended_blocks_nothing(sandbox, monkeypatch):
    """bytedance/SandboxFusion#53: what nobody reads fills the pipe, and its end is never seen."""
    kill = asyncio.subprocess.Process.kill
    monkeypatch.setattr(
        asyncio.subprocess.Process,
        "kill",
        lambda process: asyncio.get_running_loop().call_later(0.2, kill, process),
    )
    endless = make_tool(output=100).run(ESCAPES["endless output"])
    observation = asyncio.run(asyncio.wait_for(endless, 60))
    assert observation.fault == "output"


def test_programs_end_when_their_owner_is_killed(sandbox):
    before = {p.pid for p in psutil.process_iter()}
    code = (
        "import asyncio\nfrom onpolicy.agents.tools.python import PythonTool\n"
        f"asyncio.run(PythonTool(time_limit=100, python='{PYTHON}').run('import time; time.sleep(100)'))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as owner:
        while not begun_since(before):
            time.sleep(0.05)
        owner.kill()
    while begun_since(before):
        time.sleep(0.05)


def test_a_host_without_bubblewrap_or_namespaces_refuses(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bwrap is not installed, .*apt-get install bubblewrap"):
        run(PythonTool(), "print(1)")
    broken = "echo 'bwrap: No permissions to create new namespace'; exit 1"
    monkeypatch.setattr(PythonTool, "_command", lambda *_: ["/bin/sh", "-c", broken])
    with pytest.raises(ConfigError, match=r"no sandbox on this host .*No permissions .*sysctl"):
        run(PythonTool(), "print(1)")
