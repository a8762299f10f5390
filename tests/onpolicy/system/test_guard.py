"""The process in front of a server, with servers that misbehave."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.support.processes import is_gone
from tests.support.train_runs import wait_for

SCRIPT = """
import os, signal, subprocess, sys, time
from onpolicy.system import guard

def serve(directory):
{body}

if __name__ == "__main__":
    sys.exit(guard.run(serve, secrets=["s3cret", 'quo"te']))
"""

HANGS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", flush=True)
while True:
    time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a guard whose server runs `body`; returns it, and what it says first."""
    guards = []

    def start_guard(body, lines=1, temporary=tmp_path / "t", script=SCRIPT):
        text, script = script, tmp_path / "server.py"
        script.write_text(text.format(body=textwrap.indent(body, "    ")))
        temporary.mkdir()
        guard = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        guards.append(guard)
        return guard, [guard.stdout.readline().strip() for _ in range(lines)]

    yield start_guard
    for guard in guards:
        guard.kill()


def left(tmp_path):
    return list((tmp_path / "t").iterdir())


def test_a_server_that_hangs_ends_when_its_owner_lets_go_and_takes_all_others_along(
    start, tmp_path
):
    guard, _ = start(HANGS)
    below = psutil.Process(guard.pid).children(recursive=True)
    assert len(below) == 2 and left(tmp_path)
    guard.stdin.close()
    guard.wait(100)
    assert all(map(is_gone, below))
    assert left(tmp_path) == []


def test_orphans_of_a_server_that_was_killed_end_with_it(start, tmp_path):
    guard, _ = start(HANGS)
    server, orphan = psutil.Process(guard.pid).children(recursive=True)
    server.kill()
    assert guard.wait(100) == 128 + signal.SIGKILL
    assert is_gone(orphan)
    assert left(tmp_path) == []


def test_a_server_does_not_outlive_a_guard_that_was_killed(start):
    guard, _ = start(HANGS)
    (server,) = psutil.Process(guard.pid).children()
    guard.kill()
    wait_for(lambda: is_gone(server))


def test_a_guard_that_is_asked_to_end_cleans_up(start, tmp_path):
    guard, _ = start(HANGS)
    guard.terminate()
    assert guard.wait(100) == 0
    assert left(tmp_path) == []


@pytest.mark.parametrize(("body", "code"), [("pass", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_the_exit_code_is_the_servers(start, body, code):
    assert start(body, lines=0)[0].wait(100) == code


def test_a_server_that_ended_is_not_waited_for_because_of_the_processes_it_forked(start):
    forks = "if os.fork() == 0:\n    time.sleep(1000)\nsys.exit(3)"
    assert start(forks, lines=0)[0].wait(100) == 3


def test_a_server_is_given_a_directory_of_its_own(start, tmp_path):
    guard, (directory,) = start("print(directory, flush=True)\ntime.sleep(1000)")
    assert Path(directory).parent == tmp_path / "t" and Path(directory).is_dir()
    guard.stdin.close()
    guard.wait(100)
    assert not Path(directory).exists()


def test_a_temporary_directory_too_deep_for_sockets_is_refused(start, tmp_path, capfd):
    guard, _ = start("pass", 0, tmp_path / ("t" * 60))
    assert guard.wait(100) == 1
    assert "ConfigError: TMPDIR=" in (error := capfd.readouterr().err)
    assert "(107 bytes). Set TMPDIR to a shorter path" in error


def test_what_a_server_says_waits_for_secrets_that_are_told_later(start, tmp_path):
    """Nothing is passed on before, also of what was said before."""
    body = "print('s3cret and late', flush=True)\ntime.sleep(1000)"
    later = "secrets=[], when_told=lambda: [sys.stdin.readline().strip()]"
    guard, _ = start(body, 0, script=SCRIPT.replace("""secrets=["s3cret", 'quo"te']""", later))
    time.sleep(1)
    guard.stdin.write("late\n")
    guard.stdin.flush()
    assert guard.stdout.readline() == "s3cret and ...\n"
    guard.stdin.close()
    guard.wait(100)
    assert left(tmp_path) == []


def test_a_guard_whose_owner_ends_before_it_tells_anything_ends_too(start, tmp_path):
    later = "secrets=[], when_told=lambda: [sys.stdin.readline().strip()]"
    guard, _ = start(HANGS, 0, script=SCRIPT.replace("""secrets=["s3cret", 'quo"te']""", later))
    guard.stdin.close()
    guard.wait(100)
    assert left(tmp_path) == []


def test_secrets_do_not_come_into_the_log(start):
    body = """
    import json
    print("key s3cret.", {"key": "s3cret", "other": 'quo"te'}, flush=True)
    print(json.dumps({"key": "s3cret", "other": 'quo"te'}), flush=True)
    print("to stderr: s3cret", file=sys.stderr, flush=True)
    subprocess.run(["echo", "a child knows s3cret"])
    """
    _, lines = start(textwrap.dedent(body), lines=4)
    assert lines == [
        "key .... {'key': '...', 'other': '...'}", '{"key": "...", "other": "..."}',
        "to stderr: ...", "a child knows ...",
    ]  # fmt: skip
