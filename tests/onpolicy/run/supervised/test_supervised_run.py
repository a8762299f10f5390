"""A run of `onpolicy sft` on a trainer of this process: it goes on to the same bits, and is taken up."""

import json
from contextlib import contextmanager

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.sft_flags import SftConfig
from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import weight_files
from onpolicy.run.supervised import supervised_run
from onpolicy.run.supervised.supervised_run import read_inputs
from onpolicy.training import distributed, make_trainer

ROWS = [{"prompt": f"{a}{b}", "label": f"{b}{a}"} for a in "abcde" for b in "fghijk"]


@contextmanager
def trainer_here(config, contract, needs, logs):
    yield make_trainer(config, contract, 1)


@pytest.fixture
def learn(checkpoint, tmp_path, monkeypatch):
    """Runs the command with these flags, the rows cut into 5 steps of 5."""
    distributed.init_process_group()
    monkeypatch.setattr(supervised_run, "trainer_on_cluster", trainer_here)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def run(name, *argv):
        flags = [
            "--hf-checkpoint", str(checkpoint), "--prompt-data", str(file), "--dtype", "float32",
        ]  # fmt: skip
        flags += ["--run-dir", str(tmp_path / f"runs/{name}"), "--global-batch-size", "5"]
        flags += ["--lr", "1e-2", "--lr-warmup-steps", "2", "--save-hf", str(tmp_path / name)]
        config = parse(SftConfig, [*flags, *argv], "onpolicy sft")
        validate(config)
        inputs = read_inputs(config)
        return supervised_run.fine_tune(config, inputs)

    return run


def records(tmp_path, name):
    lines = (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [{k: x for k, x in json.loads(line).items() if "perf/" not in k} for line in lines]


def written(directory):
    return [file.read_bytes() for file in weight_files(directory, "--hf-checkpoint")]


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(learn, tmp_path):
    save = ("--save", str(tmp_path / "save"), "--save-interval", "2")
    evaluated = ("--eval-prompt-data", str(tmp_path / "rows.jsonl"), "--eval-interval", "2")
    whole = learn("whole", *save, *evaluated)
    rest = learn("rest", "--load", str(tmp_path / "save/step_000004"), *evaluated)
    assert whole == rest and whole.steps == 6
    assert written(tmp_path / "whole") == written(tmp_path / "rest")
    assert written(tmp_path / "save/step_000006/hf") == written(tmp_path / "whole")
    first, later = records(tmp_path, "whole"), records(tmp_path, "rest")
    assert [each for each in first if each["step"] >= 4] == later
    losses = [each["eval/loss"] for each in first if "eval/loss" in each]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert [each["train/lr"] for each in first if "train/lr" in each] == [5e-3, *[1e-2] * 5]


def test_other_rows_or_another_order_are_another_run(learn, tmp_path):
    assert (
        learn("one", "--max-steps", "2").run_hash
        != learn("two", "--max-steps", "2", "--seed", "1").run_hash
    )
    save = str(tmp_path / "save")
    learn("three", "--save", save, "--max-steps", "1")
    with pytest.raises(ConfigError, match=r"lr=0\.1, was 0\.01"):
        learn("four", "--load", save, "--max-steps", "1", "--lr", "0.1")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[::-1]))
    with pytest.raises(ConfigError, match="its prompts are others"):
        learn("five", "--load", save, "--max-steps", "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--global-batch-size", "31"], "has 30 rows, fewer than an optimizer step takes"),
        (["--max-steps", "2", "--num-epoch", "3"], "--num-epoch says when to end, too"),
        (["--eval-interval", "2"], "only --eval-prompt-data reads it"),
        (["--log-samples", "3"], "only `onpolicy train` reads it"),
        (["--save-hf", "."], "is there already"),
        (["--save-hf", ""], "neither is given"),
        (["--save-interval", "2"], "only --save reads it"),
    ],
)
def test_what_would_not_work_is_refused_before_anything_starts(learn, argv, message):
    with pytest.raises(ConfigError, match=message):
        learn("refused", *argv)
