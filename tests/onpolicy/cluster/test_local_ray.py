"""Starting a run's own Ray, and what a run hears of its end."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from onpolicy.cluster import local_ray
from onpolicy.errors import EngineError
from tests.support.footprint import Footprint
from tests.support.forked_processes import forked_processes

FAILS = 'print("Exception: The current node timed out during startup."); raise SystemExit(1)'
HANGS = "import time; time.sleep(1000)"
STARTS = f'print("{local_ray.ADDRESS}127.0.0.1:6379", flush=True); input()'
ENDS = f'print("{local_ray.ADDRESS}127.0.0.1:6379", flush=True)'


@pytest.fixture
def attempts(monkeypatch):
    """Lets these programs be what is started for Ray, one after the other; the last one for ever."""

    def use(*programs):
        left = list(programs)

        def guard():
            program = left.pop(0) if len(left) > 1 else left[0]
            return subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        monkeypatch.setattr(local_ray, "_guard", guard)
        monkeypatch.setattr(local_ray, "_END_SECONDS", 0.1)
        return left

    return use


@pytest.mark.parametrize("first", [FAILS, HANGS])
def test_a_start_that_fails_or_hangs_is_tried_again(attempts, monkeypatch, first):
    monkeypatch.setattr(local_ray, "_ATTEMPT_SECONDS", 1.0)
    attempts(first, STARTS)
    with local_ray.local_ray(60.0, pytest.fail) as address:
        assert address == "127.0.0.1:6379"


def test_starts_that_all_fail_are_told_in_a_sentence_with_a_remedy(attempts):
    attempts(FAILS)
    with pytest.raises(EngineError) as refused, local_ray.local_ray(60.0, pytest.fail):
        pass
    assert "in 3 attempts. It said last: Exception: The current node timed" in str(refused.value)
    assert "--rollout-start-timeout" in str(refused.value) and "\n" not in str(refused.value)


def test_a_start_takes_no_longer_than_it_may(attempts):
    attempts(HANGS)
    with (
        pytest.raises(EngineError, match=r"in 1 attempts\. It said last: nothing in 0 s"),
        local_ray.local_ray(0.5, pytest.fail),
    ):
        pass


def test_its_end_is_told_unless_it_was_asked_for(attempts):
    told, is_told = [], threading.Event()

    def on_loss(error):
        told.append(error)
        is_told.set()

    attempts(STARTS, ENDS)
    with local_ray.local_ray(60.0, on_loss):
        pass
    assert not told
    with local_ray.local_ray(60.0, on_loss):
        assert is_told.wait(60)
    assert "Ray's processes on this host have ended" in str(told[0])


def test_one_that_was_begun_before_is_taken_over_and_ends_if_nobody_does(attempts):
    left = attempts(STARTS, FAILS)
    with local_ray.begun(), local_ray.local_ray(60.0, pytest.fail) as address:
        assert address == "127.0.0.1:6379" and left == [FAILS]
    attempts(STARTS)
    with local_ray.begun():
        process = local_ray._begun
        assert process.poll() is None
    assert process.poll() is not None and local_ray._begun is None


def test_one_that_was_begun_and_failed_is_an_attempt(attempts):
    attempts(FAILS)
    with (
        pytest.raises(EngineError, match="in 3 attempts"),
        local_ray.begun(),
        local_ray.local_ray(60.0, pytest.fail),
    ):
        pass


LOSER = """
import os, signal, sys
from pathlib import Path

import psutil

from onpolicy.compat.process import prepare_process
from onpolicy.cluster.ray_session import session
from onpolicy.config import TrainConfig
from onpolicy.config.groups import ClusterConfig
from onpolicy.errors import EngineError
from onpolicy.system import ending


def lose(hosts):
    import ray

    from onpolicy.cluster.placement import Slot
    from onpolicy.cluster.trainer_ranks import TrainerRanks

    found = {each.name(): each for each in psutil.Process().children(recursive=True)}
    guard = psutil.Process().children()[0]
    if sys.argv[1] == "all":
        found["gcs_server"].kill()
        guard.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    found[sys.argv[1]].kill()
    slot = Slot(host=hosts[0], devices=(), cpu_threads=1)
    try:
        TrainerRanks(TrainConfig(), None, Path(sys.argv[2]), [slot])
    except EngineError as error:
        print("told:", error, flush=True)


if __name__ == "__main__":
    prepare_process()
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        with ending.heard(), session(ClusterConfig()) as hosts:
            lose(hosts)
    except ending.Ended as ended:
        sys.exit(ended.code)
"""


@pytest.mark.long
@pytest.mark.parametrize("killed", ["raylet", "gcs_server", "all"])
def test_ray_that_dies_while_ranks_are_made_ends_the_command_with_its_own_words(tmp_path, killed):
    """Ranks were waited for without end. `all`: also its guard and its owner, who tells nothing then."""
    script = tmp_path / "loser.py"
    script.write_text(LOSER)
    with TemporaryDirectory() as temporary, forked_processes():  # a path short enough for sockets
        process = subprocess.Popen(
            [sys.executable, str(script), killed, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": temporary},
        )
        assert process.stdout.readline() == "ready\n"
        footprint = Footprint(process.pid, Path(temporary))
        said = "".join(process.communicate("\n", timeout=200))
        assert process.returncode == (-9 if killed == "all" else 1), said
        assert footprint.left(10) == []
        if killed != "all":
            assert "Ray's processes on this host have ended" in said and "--load" in said
            assert "Traceback" not in said
