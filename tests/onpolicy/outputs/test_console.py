"""What a command says of itself, and what its progress looks like without a terminal."""

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from onpolicy.outputs import console, progress
from onpolicy.outputs.progress import Phases, Progress, print_summary
from onpolicy.outputs.totals import RunSummary, RunTotals


@pytest.fixture
def logged(capsys):
    """Logs through a freshly configured console; returns the lines on standard error."""
    root, ours = logging.getLogger(), logging.getLogger("onpolicy")
    before = root.handlers[:], root.level, ours.level

    def log(*messages):
        console.configure_logging()
        for name, level, message in messages:
            logging.getLogger(name).log(level, message)
        return capsys.readouterr().err.splitlines()

    yield log
    root.handlers[:], root.level, ours.level = before


MESSAGES = [
    ("onpolicy.run.engines", logging.INFO, "loading"),
    ("onpolicy.run.engines", logging.DEBUG, "a detail"),
    ("onpolicy.run.run", logging.WARNING, "careful"),
    ("other.package", logging.WARNING, "deprecated"),
    ("sglang.srt.plugins", logging.INFO, "Available plugins"),
    ("onpolicy.bench.turns", logging.INFO, "warmed up"),
]


def test_every_line_says_for_how_long_the_command_has_run(logged):
    lines = logged(*MESSAGES)
    assert [re.sub(r"^\[\d+:\d\d:\d\d\] ", "", line) for line in lines] == [
        "loading", "WARNING: careful", "WARNING: other.package: deprecated", "warmed up",
    ]  # fmt: skip


def test_lines_go_to_what_is_standard_error_now_as_a_progress_bar_wants_it(logged, monkeypatch):
    logged()
    bar = io.StringIO()
    monkeypatch.setattr(sys, "stderr", bar)
    logging.getLogger("onpolicy").info("above the bar")
    assert bar.getvalue().endswith("above the bar\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0:00:00"), (67, "0:01:07"), (90061, "1 day, 1:01:01")]
)
def test_durations_are_in_hours_minutes_and_seconds(seconds, text):
    assert console.duration(seconds) == text


METRICS = {"rollout/raw_reward": 0.5, "perf/rollout_tokens_per_second": 1000.0}


@pytest.fixture
def clock(monkeypatch):
    """Time as the test sets it."""
    now = [100.0]
    monkeypatch.setattr(progress, "elapsed", lambda: now[0])
    return now


def test_a_line_has_elapsed_time_and_an_estimate_of_the_rest(clock, capsys):
    bar = Progress(10, 4)
    clock[0] += 30
    bar.on_step(4, METRICS)
    clock[0] += 10
    bar.on_step(5, METRICS)
    bar.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "rollout 5/10  reward 0.500  mismatched 0 of 0  1000 tok/s  0:02:10 elapsed, 0:02:30 left"
    )
    assert second.startswith("rollout 6/10 ")
    assert second.endswith("0:02:20 elapsed, 0:01:20 left")  # 4 more at 20 seconds each


def test_a_line_says_what_share_of_tokens_is_distinct_where_prefixes_are_shared(clock, capsys):
    bar = Progress(10, 0)
    bar.on_step(0, METRICS | {"train/distinct_tokens_share": 0.684})
    bar.on_step(1, METRICS)
    bar.close()
    shared, whole = capsys.readouterr().out.splitlines()
    assert "1000 tok/s  distinct tokens 68%  0:" in shared and "distinct" not in whole


def test_the_estimate_follows_the_latest_rollouts(clock, capsys):
    bar = Progress(200, 0)
    for step in range(100):
        clock[0] += 1 if step < 50 else 60
        bar.on_step(step, METRICS)
    assert capsys.readouterr().out.splitlines()[-1].endswith("1:40:00 left")


ON_A_TERMINAL = """
import logging
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.progress import Progress
configure_logging()
bar = Progress(5, 0)
bar.on_requests(256)
bar.on_step(0, {"rollout/raw_reward": 0.5, "perf/rollout_tokens_per_second": 1000.0})
bar.on_response(12, 7)
logging.getLogger("onpolicy").info("above the bar")
bar.close()
"""


def test_on_a_terminal_there_is_a_bar_and_lines_stand_above_it():
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", ON_A_TERMINAL]
    subprocess.run(command, stdout=its, stderr=its, env=environment, check=True)
    os.close(its)
    text = ""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
        while data := os.read(ours, 4096):
            text += data.decode()
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    assert any(line.strip().endswith("] above the bar") for line in lines)
    last = [line for line in lines if line.startswith("rollout")][-1]
    assert re.search(r"1/5 0:00:0\d<0:00:0\d reward 0.500 mismatched 0/0 12/256 sampled", last)
    assert len(last.rstrip()) <= 80


def test_a_long_rollout_is_not_silent(clock, capsys):
    bar = Progress(2, 0)
    bar.on_requests(256)
    for done in range(1, 101):
        clock[0] += 2
        bar.on_response(done, 7)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "31 of 256 sampled  0:02:42 elapsed"
    assert len(lines) == 3


def test_phases_are_named_and_a_long_one_is_counted(clock, caplog):
    caplog.set_level("INFO")
    phases = Phases()
    phases.begin("pushing")
    phases.advance(1)
    phases.begin("sampling", 32)
    for done in range(1, 33):
        clock[0] += 1
        phases.advance(done)
    phases.close()
    assert caplog.messages == ["pushing", "sampling", "sampling: 16 of 32", "sampling: 32 of 32"]


def test_the_summary_says_what_could_not_be_scored_and_what_was_asked_again(capsys):
    def told(**totals):
        print_summary(
            RunSummary(run_dir="run", run_hash="abc", rollouts=4, totals=RunTotals(**totals))
        )
        return capsys.readouterr().out

    rows = ("samples that could not be scored", "calls of reward rules repeated")
    assert not any(row in told() for row in rows)
    assert all(row in told(num_unscored=2, num_repeats=3) for row in rows)
    metrics = {"rollout/num_unscored": 2.0, "rollout/reward_repeats": 1.0}
    totals = RunTotals().plus(metrics, is_first=True).plus(metrics, is_first=False)
    assert (totals.num_unscored, totals.num_repeats) == (4, 2)
