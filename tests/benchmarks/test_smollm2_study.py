"""The study of SmolLM2: what is planned is valid, a run that was cut is recorded once it has ended, and
the page says what is recorded."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import smollm2_study as study
from benchmarks import smollm2_study_page as page
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate

CONFIG = str(study.ROOT / "examples" / "smollm2" / "config.yaml")
GIVEN = ["--hf-checkpoint", "/m", "--prompt-data", "/d", "--eval-prompt-data", "/e", "--save", "/s"]


def test_every_run_of_the_plan_is_valid_and_another_one():
    runs, configs = list(study.plan()), set()
    for run in runs:
        config = parse(TrainConfig, [*GIVEN, "--custom-config-path", CONFIG, *run.flags], "x")
        validate(config)
        configs.add(repr(config))
    # Two tasks differ in their prompts, which are no flag here.
    assert len({run.name for run in runs}) == len(runs) == len(study.TASKS) * len(configs) == 72
    assert {run.case for run in runs[:6]} == {
        f"unsolvable-reinforce_plus_plus-{arm}" for arm in study.ARMS
    }


def test_every_second_problem_is_a_product_where_half_are_unsolvable():
    sums, mixed = study.problems("sums"), study.problems("unsolvable")
    assert mixed[::2] == sums[::2] and len(mixed) == len(sums)
    for row in mixed[1::2]:
        _, _, a, times, b, *_ = row["prompt"][0]["content"].replace("?", "").split()
        assert times == "*" and int(a) * int(b) == int(row["label"]) >= 10**6


def rollouts(first, last):
    keys = {**study.CURVES, "time": "perf/step_time", "mismatched": study.MISMATCHED}
    return [{"step": i, **dict.fromkeys(keys.values(), 0.25)} for i in range(first, last)]


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Commands that the study gives; a stand-in carries them out, the first for ten rollouts alone."""
    monkeypatch.setattr(study, "WORK", tmp_path / "work")
    monkeypatch.setattr(study, "RECORDS", tmp_path / "records.json")
    commands = []

    def run(command, **options):
        commands.append(command)
        given = dict(pairwise(command))
        directory = Path(given["--run-dir"])
        Path(given["--save"], "step_000010").mkdir(parents=True, exist_ok=True)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        is_cut = len(commands) == 1
        done = [*rollouts(0, 10 if is_cut else study.ROLLOUTS), {"step": 40, "eval/avg@1": 0.5}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(d) + "\n" for d in done))
        (directory / "logs" / "train.log").write_text("run hash " + "0a" * 16)
        if is_cut:
            raise subprocess.CalledProcessError(143, command)

    monkeypatch.setattr(study.subprocess, "run", run)
    monkeypatch.setattr(study, "surroundings", lambda start: {"machine": "one"})
    return commands


def call(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["study", *argv])
    study.drive_into(study.RECORDS, "", study.plan(), study.carry_out)


def test_a_run_that_was_cut_goes_on_and_is_recorded_once(launched, monkeypatch, tmp_path):
    first, second = list(study.plan())[:2]
    only = ("--only", second.name, first.name)
    call(monkeypatch, *only, "--hours", "0")
    assert launched == []
    with pytest.raises(subprocess.CalledProcessError):
        call(monkeypatch, *only)
    assert not study.RECORDS.exists()
    with pytest.raises(ValueError, match="10 rollouts, not 40"):
        study.record(second, study.WORK / second.name)

    call(monkeypatch, *only)
    assert launched[1] == launched[0] and launched[2] != launched[0]
    given = dict(pairwise(launched[0]))
    assert given["--save"] == given["--load"] and given["--run-dir"] not in given["--save"]
    records = page.read_records(study.RECORDS)
    assert [*records] == [first.name, second.name]  # in the plan's order, not that of the runs
    assert records[first.name]["curves"]["reward"] == [0.5] * 40  # of the half that can be solved
    assert records[first.name]["held_out"] == {"40": 0.5}
    assert not [*(study.WORK / "checkpoints").iterdir()]
    call(monkeypatch, *only)
    assert len(launched) == 3
    assert len(page.cases(records)) == 2 and page.differences(records)[0][:2] == [
        "aligned less stock", "1",
    ]  # fmt: skip
    page.draw_all(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_test_of_pairs_counts_every_way_to_turn_their_signs_round():
    assert page.flip_p([1.0, 2.0, 3.0]) == 2 / 8
    assert page.flip_p([1.0, -1.0]) == 1


def test_what_is_recorded_is_in_the_plan_and_aligned_arms_have_no_mismatched_token():
    runs, records = {run.name: run for run in study.plan()}, page.read_records(study.RECORDS)
    for name, record in records.items():
        assert record["command"].endswith(" ".join(runs[name].flags))
        assert bool(record["mismatched_tokens"]) == ("stock" in runs[name].arm), name
        assert record["compared_tokens"] > 0
    text = page.PAGE.read_text()
    assert page.with_tables(text, records) == text, "python -m benchmarks.smollm2_study_page"
