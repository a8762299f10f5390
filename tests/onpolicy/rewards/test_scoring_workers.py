"""Worker processes: how they start and end, what replaces them, and what counts as late.

After reports of others: verifiers#831 (answers of a busy host were late, and scored 0), pebble#42, #70
and #97 (a worker that is killed breaks the pool, or locks it up), compose-rl#146 (a stuck pool).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import psutil
import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import RewardError
from onpolicy.rewards import scoring_workers as worker_process
from onpolicy.rewards.scoring_workers import Workers
from tests.support.processes import is_gone
from tests.support.samples import rewards_of
from tests.support.samples import to_score as sample


class Held(str):
    """The name of a rule, which a worker that starts waits for, at a pipe under that name."""

    def __reduce__(self):
        return wait_for, (str(self),)


def wait_for(pipe):
    with open(pipe, "rb") as held:
        held.read()
    return "exact"


def spin(*_):
    while True:
        pass


def begin(rule, samples):
    """Have a scorer's only rule asked about samples; what waits for its answers."""
    (source,) = rule.sources
    rule._import([source])
    return rule._ask(source, [samples])


def scoring():
    """The processes that score."""
    return [process for process in active_children() if process.name == "rewards"]


def test_a_worker_that_still_starts_when_its_pool_closes_ends_and_says_nothing(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    workers = Workers(RewardConfig(), [Held(tmp_path / "pipe")], count=1)
    workers.ask("exact", [[sample("42")]])
    held = os.open(tmp_path / "pipe", os.O_WRONLY)  # waits until the worker is there
    workers.close()
    os.close(held)
    assert scoring() == []
    assert capfd.readouterr().err == ""


def test_workers_are_forks_of_one_process_that_has_imported_what_they_need(scorer):
    rule = scorer(rm_type="exact", rm_workers=2)
    begin(rule, [sample("1"), sample("2")])()
    parents = {psutil.Process(process.pid).ppid() for process in scoring()}
    assert len(parents) == 1 and os.getpid() not in parents


def test_closing_ends_a_worker_in_the_middle_of_a_call(scorer, tmp_path):
    rule = scorer(function="signals_and_hangs", rm_workers=1)
    os.mkfifo(tmp_path / "started")
    begin(rule, [sample("", started=str(tmp_path / "started"))])
    (tmp_path / "started").read_bytes()
    rule.close()
    assert scoring() == []


RUN = """
import sys
from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.scoring_workers import Workers
from tests.support.samples import to_score
if __name__ == "__main__":
    rule = "reward_functions.signals_and_hangs"
    workers = Workers(RewardConfig(custom_rm_path=rule), [rule], count=1)
    workers.ask(rule, [[to_score("", started=sys.argv[1])]])()
"""


def test_a_worker_that_waits_in_a_function_ends_with_a_run_that_is_killed(tmp_path):
    os.mkfifo(tmp_path / "started")
    (tmp_path / "run.py").write_text(RUN)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, tmp_path / "run.py", tmp_path / "started"]
    run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    pid = int((tmp_path / "started").read_text())
    worker = psutil.Process(pid)
    assert run.pid in {each.pid for each in worker.parents()}
    run.kill()
    run.wait()
    while not is_gone(worker):
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_that_is_killed_while_idle_is_replaced_and_said(scorer, caplog, how):
    rule, samples = scorer(rm_type="exact", rm_workers=1), [sample("42"), sample("41")]
    rule.score([samples])
    (process,) = scoring()
    os.kill(process.pid, how)
    process.join()
    metrics = rule.score([samples])
    assert rewards_of(samples) == [1.0, 0.0]
    assert not any(metrics.values())
    assert f"a reward worker has ended between two calls ({how.name})" in caplog.text


def test_of_two_workers_the_one_that_is_stopped_holds_up_no_other(scorer, tmp_path):
    rule = scorer(function="meets_others", rm_workers=2)
    rule.score([[sample(str(i), directory=str(tmp_path), count=2) for i in range(2)]])
    stopped, _ = scoring()
    os.kill(stopped.pid, signal.SIGSTOP)
    (tmp_path / "alone").mkdir()
    (asked,) = samples = [sample("0", directory=str(tmp_path / "alone"), count=1)]
    try:
        answers = [begin(rule, samples) for _ in range(2)]  # one of them is the other worker's
        while not (tmp_path / "alone" / asked.response).exists():
            pass
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert [each()[0]["score"] for each in answers] == [1.0, 1.0]


def test_a_call_whose_process_dies_once_is_repeated_and_its_reward_is_that_of_any_other(
    scorer, tmp_path, caplog
):
    rule = scorer(function="dies_once", rm_workers=1, rm_max_error_rate=0.0)
    samples = [sample("good"), sample("dies", marks=str(tmp_path)), sample("good")]
    metrics = rule.score([samples])
    assert rewards_of(samples) == [4.0, 4.0, 4.0]
    assert metrics["rollout/reward_repeats"] == 1
    assert metrics["rollout/reward_errors"] == metrics["rollout/num_unscored"] == 0
    assert "1 calls of reward rules were repeated; the first ended its process (SIGKILL)" in (
        caplog.text
    )


def test_a_worker_that_was_stopped_for_longer_than_the_limit_is_not_late(
    scorer, tmp_path, monkeypatch
):
    """The limit is of processor time: a host that does not let a worker run decides no reward."""
    monkeypatch.setattr(worker_process, "WALL_FACTOR", 1000.0)
    rule = scorer(function="stops_itself", rm_time_limit=0.2, rm_workers=1, rm_max_error_rate=0.0)
    samples = [sample("x", pid=str(tmp_path / "pid"))]
    os.mkfifo(tmp_path / "pid")
    answers = begin(rule, samples)
    pid = int((tmp_path / "pid").read_text())
    threading.Timer(3 * 0.2, os.kill, (pid, signal.SIGCONT)).start()
    (said,) = answers()
    assert said["score"] == 1.0


def test_a_call_that_uses_its_processor_time_up_is_late_and_ends_the_run_beyond_the_limit(
    scorer, caplog, monkeypatch
):
    """The control of the test above; a computation in C that no signal handler interrupts ends too."""
    monkeypatch.setattr(worker_process, "WALL_FACTOR", 1000.0)
    given = {"function": "spins", "rm_time_limit": 0.2, "rm_workers": 1}
    samples = [sample("spins in C"), sample("good")]
    metrics = scorer(**given, rm_max_error_rate=0.5).score([samples])
    assert rewards_of(samples) == [None, 1.0]
    assert metrics["rollout/reward_timeouts"] == metrics["rollout/reward_repeats"] == 1
    assert "run in which they can be scored has another hash" in caplog.text
    message = (
        r"1 of 1 .* more than --rm-max-error-rate=0\.4 .* no result within --rm-time-limit=0\.2"
    )
    with pytest.raises(RewardError, match=message):
        scorer(**given, rm_max_error_rate=0.4).score([[sample("spins")]])


def test_a_call_that_waits_for_ever_ends_by_the_clock(scorer, monkeypatch):
    monkeypatch.setattr(worker_process, "WALL_FACTOR", 2.0)
    samples = [sample("hang"), sample("abc")]
    rule = scorer(function="length_or_hang", rm_time_limit=0.1, rm_workers=1, rm_max_error_rate=0.5)
    metrics = rule.score([samples])
    assert rewards_of(samples) == [None, 3.0]
    assert metrics["rollout/reward_timeouts"] == 1


def test_a_worker_that_is_stopped_for_good_is_replaced_and_its_call_repeated(
    scorer, caplog, monkeypatch
):
    monkeypatch.setattr(worker_process, "WALL_FACTOR", 8.0)
    given = {"rm_type": "exact", "rm_workers": 1, "rm_time_limit": 0.5, "rm_max_error_rate": 0.0}
    rule, samples = scorer(**given), [sample("42"), sample("41")]
    rule.score([samples])
    (stopped,) = scoring()
    os.kill(stopped.pid, signal.SIGSTOP)
    metrics = rule.score([samples])
    assert rewards_of(samples) == [1.0, 0.0] and metrics["rollout/reward_repeats"] == 1
    assert "nor within 4 seconds by the clock" in caplog.text and not stopped.is_alive()


def test_one_call_scores_several_responses_and_each_is_scored_alone_where_one_is_late(
    scorer, monkeypatch, caplog
):
    """Sixteen samples of one worker are four calls of four."""
    calls = []
    ask = worker_process.WorkerProcess.ask

    def counted(process, function, arguments):
        calls.append(function.__name__)
        is_late = "spins" in str(arguments)
        return ask(process, spin if is_late else function, arguments)

    monkeypatch.setattr(worker_process.WorkerProcess, "ask", counted)
    rule = scorer(rm_type="exact", rm_workers=1, rm_time_limit=0.5, rm_max_error_rate=0.5)
    samples = [sample(str(41 + i % 3)) for i in range(16)]
    rule.score([samples])
    expected = [float(i % 3 == 1) for i in range(16)]
    assert calls == ["score_each"] * 4 and rewards_of(samples) == expected
    calls.clear()
    samples[5] = sample("spins")
    metrics = rule.score([samples])
    assert rewards_of(samples) == [*expected[:5], None, *expected[6:]]
    assert (
        calls == ["score_each"] * 2 + ["score"] * 5 + ["score_each"] * 2
    )  # once more for the late
    assert metrics["rollout/reward_timeouts"] == 1 and metrics["rollout/reward_repeats"] == 2
    assert "gave no result within --rm-time-limit=0.5 seconds" in caplog.text


def test_processes_that_are_started_early_are_the_ones_that_score(scorer):
    rule = scorer(rm_type="exact", rm_workers=2)
    rule.start()
    while len(before := {process.pid for process in scoring()}) < 2:
        time.sleep(0.01)
    samples = [sample("42") for _ in range(16)]
    rule.score([samples])
    assert {process.pid for process in scoring()} == before


def test_a_rule_that_can_be_loaded_no_more_ends_the_run_whatever_may_fail(scorer, tmp_path):
    module = tmp_path / "gone.py"
    module.write_text("def score(sample): return 1.0")
    rule = scorer(custom_rm_path=f"{module}:score", rm_workers=1, rm_max_error_rate=1.0)
    rule.score([[sample("")]])
    for text in ("import os; os._exit(9)", "1 / 0"):
        module.write_text(text)
        for process in scoring():
            process.kill()
            process.join()
        with pytest.raises(RewardError, match=r"1 of 1 samples could not be scored: a new worker"):
            rule.score([[sample("")]])
