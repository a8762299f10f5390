"""Run directory, metrics and run hash."""

import dataclasses
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ConfigError, OutputError
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.metrics import JsonlSink, read_jsonl
from onpolicy.outputs.totals import RunHash
from onpolicy.report.page import read_runs
from onpolicy.system.files import parse_json
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(linear=(), attention=(), norm=(), vocab_size=1),
)


def steps(file):
    return [record["step"] for record in read_jsonl(file)]


def test_an_earlier_run_in_the_same_directory_is_kept(tmp_path):
    for content in ("first", "second", "third"):
        directory = RunDirectory(str(tmp_path / "run"), resumes=False)
        directory.metrics_file.write_text(content)
    kept = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run.1", "run.2", "run")]
    assert kept == ["first", "second", "third"]


def test_a_resumed_run_keeps_the_lines_before_its_checkpoint_and_repeats_the_rest(tmp_path):
    file = tmp_path / "metrics.jsonl"
    sink = JsonlSink(file, 0)
    for step in range(5):
        sink.log(step, {"x": step / 3})
    sink.close()
    file.write_text(file.read_text() + '{"step": 5, "x"')  # a kill in the middle of a line
    JsonlSink(file, 3).close()
    assert steps(file) == [0, 1, 2]
    assert read_jsonl(file)[2]["x"] == 2 / 3


def test_an_earlier_run_is_not_moved_with_the_current_directory_in_it(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    for path in ("..", str(tmp_path)):
        with pytest.raises(
            ConfigError, match="holds an earlier run, which cannot be moved aside with"
        ):
            RunDirectory(path, resumes=False)
    assert (tmp_path / "metrics.jsonl").exists()
    RunDirectory("..", resumes=True)


def test_an_earlier_run_is_not_moved_with_what_the_new_one_needs_in_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    needed = {"--hf-checkpoint": "/model", "--save": str(run / "checkpoints")}
    with pytest.raises(ConfigError, match=r"cannot be moved aside with --save in it\. Give a dir"):
        RunDirectory(str(run), resumes=False, needed=needed)


def test_a_second_run_in_the_directory_is_refused_and_moves_nothing(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    directory.metrics_file.write_text("")
    code = "import sys; from onpolicy.outputs.directory import RunDirectory as R; R(sys.argv[1], False)"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert f"process {os.getpid()} on {os.uname().nodename}, since" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    directory.close()
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.1"]


@pytest.mark.parametrize(
    "damage", [b'{"step": 1, "x"', b"[1]", b'{"x": 1}', b'{"step": "1"}', b"\xff\xfe", b"\0\0"]
)
def test_a_damaged_line_is_kept_aside_and_costs_no_other_line(tmp_path, damage, caplog):
    file = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "x": 0.5}' % step for step in range(10)]
    file.write_bytes(b"\n".join([*lines[:2], damage, *lines[3:]]) + b"\n")
    assert steps(file) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    JsonlSink(file, 8)
    assert file.read_bytes().splitlines() == [*lines[:2], *lines[3:8]]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damage + b"\n"
    assert "metrics.jsonl: 1 lines are no records; they are in" in caplog.text
    JsonlSink(file, 8)
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damage + b"\n"


def test_a_metric_that_is_no_finite_number_is_json_and_is_read_back(tmp_path):
    file = tmp_path / "metrics.jsonl"
    logged = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 0.5, "e": 3}
    JsonlSink(file, 0).log(0, logged)
    assert parse_json(file.read_text()) == {
        "step": 0, "a": "inf", "b": "-inf", "c": "nan", "d": 0.5, "e": 3,
    }  # fmt: skip
    for found in (
        read_jsonl(file)[0],
        {k: v[0] for k, v in read_runs([str(file)])[0].curves.items()},
    ):
        assert math.isnan(found.pop("c"))
        found.pop("step", None)
        assert found == {name: value for name, value in logged.items() if name != "c"}


def test_a_full_disk_is_an_error_that_says_where_and_how_to_go_on(tmp_path):
    script = Path(__file__).with_name("full_disk.py")
    path = os.pathsep.join([str(script.parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    message = (
        r"(\S+) could not be written \(File too large\)\. Nothing .*, with --load if there are"
    )
    errors = re.findall(rf"^--run-dir=\S+/run: {message}", done.stdout, flags=re.M)
    names = ["config.json", "metrics.jsonl", "governor.jsonl"]
    assert [Path(error).name for error in errors] == names
    assert re.fullmatch(r"\S+train.log could not be written \(File too large\)\n", done.stderr)
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_a_directory_that_was_removed_is_not_said_to_have_kept_anything(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    shutil.rmtree(directory.path)
    with pytest.raises(OutputError, match=r"was removed .* what it held is lost") as told:
        directory.record_move(2, "stock", "tis", "k3 over its limit")
    assert "Nothing that was written before is lost" not in str(told.value)


def test_a_run_writes_down_what_it_was_started_with(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    directory.write_records(TrainConfig(seed=7), CONTRACT)
    records = {f.stem: json.loads(f.read_text()) for f in directory.path.glob("*.json")}
    assert records["config"]["seed"] == 7
    assert records["contract"]["fingerprint"] == CONTRACT.fingerprint
    assert records["versions"]["torch"]


def test_tensorboard_and_wandb_write_only_if_asked_for_and_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = TrainConfig()
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    assert len(directory.sinks(config, 0)) == 1
    output = dataclasses.replace(config.output, use_tensorboard=True, use_wandb=True)
    sinks = directory.sinks(dataclasses.replace(config, output=output), 0)
    for sink in sinks:
        sink.log(0, {"rollout/raw_reward": 0.5})
        sink.close()
    assert list((directory.path / "tensorboard").glob("events.*"))
    assert list((directory.path / "wandb").glob("offline-run-*"))


def group(tokens=(5, 6), log_probs=(-0.5, -0.25), reward=1.0, episodes=(0,), **more):
    prompt = Prompt(index=0, prompt_ids=[1], label="", text="")
    samples = [
        Sample(
            prompt=prompt,
            sample_index=episode,
            trajectory=answered(prompt, make_completion(tokens, log_probs)),
            reward=reward,
            **more,
        )
        for episode in episodes
    ]
    return SampleGroup(prompt=prompt, samples=samples)


def run_hash(*steps, start=""):
    result = RunHash(start)
    for step in steps:
        result.add_step(*step)
    return result.value


def test_the_run_hash_depends_on_samples_log_probs_rewards_losses_and_weights():
    base = ([group()], 0.5, "w")
    others = [
        ([group(tokens=(5, 7))], 0.5, "w"),
        ([group(log_probs=(-0.5, -0.25000003))], 0.5, "w"),
        ([group(reward=0.0)], 0.5, "w"),
        ([group()], 0.5000000001, "w"),
        ([group()], 0.5, "v"),
        ([group(episodes=(0, 1))], 0.5, "w"),
        ([group(episodes=(0, 0))], 0.5, "w"),
        ([group(token_rewards=[0.5, 0.5])], 0.5, "w"),
        ([group(token_rewards=[0.0, 1.0])], 0.5, "w"),
        ([group(token_weights={"objective": [0.0, 1.0]})], 0.5, "w"),
        ([group(token_weights={"kl_loss": [0.0, 1.0]})], 0.5, "w"),
    ]
    assert len({run_hash(step) for step in [base, *others]}) == len(others) + 1
    assert run_hash(base) == run_hash(base)


def test_a_resumed_run_continues_the_hash():
    first, second = ([group()], 0.5, "w"), ([group(reward=0.0)], 0.25, "v")
    assert run_hash(second, start=run_hash(first)) == run_hash(first, second)


def test_the_log_goes_into_the_run_directory_with_debug_messages(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    logger = logging.getLogger("onpolicy.test")
    logger.setLevel(logging.DEBUG)
    with directory.log_file():
        logger.debug("inside")
    logger.error("outside")
    text = (directory.logs / "train.log").read_text()
    assert "inside" in text
    assert "outside" not in text
