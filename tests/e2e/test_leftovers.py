"""However a run ends, it leaves nothing behind: no process, no shared memory, no temporary file.

And while it runs, nobody else on the host gets in or reads its secrets.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import yaml

from onpolicy.config.secrets import reveal
from onpolicy.rollout.client import EngineClient
from tests.support.footprint import Footprint
from tests.support.processes import command_line, is_guard, listening_addresses, variables
from tests.support.train_runs import finish, metrics_of, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.runs]

SECRETS = ("K-of-the-engines", "A-of-the-admin")
PATIENCE = 100.0
"""Seconds: torch's manager of shared memory, for one, ends some time after its last client."""

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture
def run(start, tmp_path):
    """Starts a run whose footprint is watched: (process, footprint)."""
    with TemporaryDirectory() as temporary:  # with a path short enough for sockets

        def start_watched(*argv):
            process = start(tmp_path, *argv, env={"TMPDIR": temporary})
            return process, Footprint(process.pid, Path(temporary))

        yield start_watched


def engine_of(process):
    children = psutil.Process(process.pid).children()
    (guard,) = filter(is_guard, children)
    return guard.children()[0]


def what_others_read(process):
    return " ".join([command_line(process), *variables(process).values()])


def under_way(tmp_path, process):
    wait_for(lambda: metrics_of(tmp_path) or process.poll() is not None)
    assert process.poll() is None, process.stdout.read()[-3000:]


MESSY_TESTS = (
    "tests/onpolicy/outputs/test_trackers.py::test_a_service_that_hangs_is_killed_and_another_can_follow",
    "tests/e2e/test_server.py::test_it_refuses_to_serve_with[a hook that SGLang cannot apply]",
)
"""A service that is killed, and a server without a guard."""


def test_the_tests_themselves_leave_nothing(tmp_path):
    with TemporaryDirectory(prefix="t") as temporary:
        environment = {**os.environ, "TMPDIR": temporary, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
        command = [sys.executable, "-m", "pytest", *MESSY_TESTS]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        footprint = Footprint(process.pid, Path(temporary))
        output, _ = process.communicate()
        assert process.returncode == 0, output[-3000:]
        assert footprint.left(PATIENCE) == []
        assert footprint.shared_memory  # there was something to clean up


@pytest.mark.anew
def test_a_run_that_ends_leaves_nothing_and_lets_nobody_in_meanwhile(run, tmp_path):
    key_file, flags = tmp_path / "key", tmp_path / "flags.yaml"
    key_file.write_text(SECRETS[0])
    flags.write_text(yaml.safe_dump({"sglang_admin_api_key": SECRETS[1]}))
    process, footprint = run(
        "--rollout-api-key", f"@{key_file}", "--custom-config-path", str(flags),
        "--weight-sync", "distributed",
    )  # fmt: skip
    under_way(tmp_path, process)
    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    assert len(processes) >= 5
    assert listening_addresses(processes) <= LOOPBACK
    command_lines = " ".join(map(command_line, processes))
    assert "--admin-api-key" not in command_lines
    output = finish(process)
    assert footprint.left(PATIENCE) == []
    assert len(footprint.shared_memory) >= 2  # there was something to clean up

    log = tmp_path / "run" / "logs" / "engine_0.log"
    assert log.stat().st_mode & 0o077 == 0
    assert "'admin_api_key': '...'" in log.read_text()
    written = [f for f in (tmp_path / "run").rglob("*") if f.is_file() and f != key_file]
    for secret in SECRETS:
        assert secret not in command_lines + output
        assert not [file for file in written if secret.encode() in file.read_bytes()]


def test_a_killed_run_leaves_nothing(run, tmp_path):
    process, footprint = run("--num-rollout", "1000")
    under_way(tmp_path, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert footprint.left(PATIENCE) == []


def test_what_is_left_when_everything_is_killed_at_once_the_next_run_removes_though_it_fails(
    run, tmp_path
):
    process, killed = run("--num-rollout", "1000")
    under_way(tmp_path, process)
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    for end in (psutil.Process.suspend, psutil.Process.kill):  # nobody acts on another's end
        for victim in everything:
            with contextlib.suppress(psutil.NoSuchProcess):  # Linux killed it with its parent
                end(victim)
    process.wait()
    assert killed.left() != []
    process, footprint = run("--rollout-max-restarts", "0", "--num-rollout", "1000")
    moved = (tmp_path / "run.1").exists  # with the metrics of the one before
    wait_for(lambda: moved() or process.poll() is not None)
    under_way(tmp_path, process)
    engine_of(process).kill()
    assert "--rollout-max-restarts=0 are used up" in finish(process, code=1)
    assert killed.left(PATIENCE) == footprint.left(PATIENCE) == []


@pytest.mark.anew  # what others read is the environment that a process was started with
def test_serve_shows_a_file_with_its_key_and_not_the_key(checkpoint, tmp_path):
    command = [sys.executable, "-m", "onpolicy.cli", "serve", "--hf-checkpoint", str(checkpoint)]
    with TemporaryDirectory() as temporary:
        process = subprocess.Popen(
            [*command, "--run-dir", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": temporary},
        )
        footprint = Footprint(process.pid, Path(temporary))
        try:
            printed = [process.stdout.readline() for _ in range(3)]
            line = r"--rollout-server-url (\S+) --rollout-api-key @(\S+)"
            url, file = re.search(line, printed[2]).groups()
            assert Path(file).stat().st_mode & 0o077 == 0
            key = reveal("--rollout-api-key", f"@{file}")
            assert EngineClient(url, key, 60, 60).report()["weights"]
            shown = [what_others_read(process) for process in footprint.processes.values()]
            assert any(shown) and not any(key in text for text in shown)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert footprint.left(PATIENCE) == [] and not Path(file).exists()
    assert key not in "".join(printed) + (tmp_path / "engine_0.log").read_text()
