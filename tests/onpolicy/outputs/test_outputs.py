"""Run directory, metrics and run hash."""

import dataclasses
import json
import logging

import pytest

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.outputs.directory import RunDirectory
from onpolicy.outputs.metrics import JsonlSink, read_jsonl
from onpolicy.outputs.run_hash import RunHash
from onpolicy.types import FinishReason, Prompt, Sample, SampleGroup

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(linear=(), heads=1, kv_heads=1, head_dim=1, norm=(), vocab_size=1),
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


def test_a_run_writes_down_what_it_was_started_with(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    directory.write_records(TrainConfig(seed=7), CONTRACT)
    records = {f.stem: json.loads(f.read_text()) for f in directory.path.glob("*.json")}
    assert records["config"]["seed"] == 7
    assert records["contract"]["fingerprint"] == CONTRACT.fingerprint
    assert records["versions"]["torch"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(str(tmp_path / "file" / "run"), resumes=False)


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


def group(tokens=(5, 6), log_probs=(-0.5, -0.25), reward=1.0):
    prompt = Prompt(index=0, token_ids=[1], label="", text="")
    sample = Sample(
        prompt=prompt,
        sample_index=0,
        response_ids=list(tokens),
        rollout_log_probs=list(log_probs),
        finish_reason=FinishReason.STOP,
        weight_version="0",
        num_cached_tokens=0,
        reward=reward,
    )
    return SampleGroup(prompt=prompt, samples=[sample])


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
