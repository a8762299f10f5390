"""Whole runs as a user starts them: reproducible bit for bit, whatever happens on the way."""

import json
import re
import signal

import psutil
import pytest

from onpolicy.cli.main import main
from onpolicy.outputs.meanings import meaning
from onpolicy.outputs.metrics import read_jsonl
from tests.support.forked_processes import forked_processes
from tests.support.processes import is_gone
from tests.support.train_runs import (
    ROLLOUTS,
    ROOT,
    TWO_RANKS,
    a_rank_is_lost,
    exported_weights,
    finish,
    kill_an_engine,
    killed_while_saving,
    metrics_of,
    run_hash,
    summary,
    wait_for,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def plain(start, data, tmp_path_factory):
    """An undisturbed run with one engine: (directory, output, hash)."""
    directory = tmp_path_factory.mktemp("plain")
    with forked_processes(False):
        process = start(
            directory, "--save", str(directory / "save"), "--save-interval", "2",
            "--eval-interval", "4", "--eval-prompt-data", str(data), "--eval-temperature", "0.9",
        )  # fmt: skip
        output = finish(process)
    return directory, output, run_hash(output)


def test_a_run_compares_every_token_of_the_first_step_and_none_differs(plain):
    directory, output, hashed = plain
    records = metrics_of(directory)
    assert f"run hash {hashed}" in (directory / "run" / "logs" / "train.log").read_text()
    assert [r["step"] for r in records] == list(range(ROLLOUTS))
    for record in records:
        assert record["parity/num_compared_tokens"] > 100
        assert record["parity/num_mismatched_tokens"] == record["train/k3_kl"] == 0
        assert record["train/ppo_kl"] != 0  # the second optimizer step is off-policy
    assert "16 samples = global_batch_size 8 x 2 optimizer steps" in output


def test_every_metric_has_a_documented_meaning(plain):
    names = {name for record in read_jsonl(plain[0] / "run" / "metrics.jsonl") for name in record}
    assert all(map(meaning, names - {"step", "rollout/reward/even", "eval/reward/even"}))


def test_the_run_directory_holds_what_one_needs_to_look_at_it_later(plain):
    run = plain[0] / "run"
    for name in ("config.json", "versions.json", "contract.json", "metrics.jsonl"):
        assert (run / name).stat().st_size > 0
    assert "starts after 0 rollouts" in (run / "logs" / "train.log").read_text()
    assert "The server is fired up" in (run / "logs" / "engine_0.log").read_text()
    assert json.loads((run / "config.json").read_text())["num_rollout"] == ROLLOUTS
    evaluations = [r for r in read_jsonl(run / "metrics.jsonl") if "eval/avg@1" in r]
    assert [r["step"] for r in evaluations] == [0, ROLLOUTS]


STAGES = (
    "loading PyTorch and transformers", "reading ", "rollout_batch_size 4 prompts",
    "starting an SGLang server; its log:", "loading the model into the trainer",
    "checking the trainer's operators", "waiting for http://", "pushing the trainer's weights",
    "after 0 rollouts, evaluation: avg@1", "the first sample:", "  prompt    ", "  response  ",
    f"rollout 1/{ROLLOUTS}", f"after {ROLLOUTS} rollouts, evaluation: avg@1",
)  # fmt: skip


def test_it_says_what_it_is_doing_from_its_first_second_on(plain):
    lines = plain[1].splitlines()
    places = [next(i for i, line in enumerate(lines) if stage in line) for stage in STAGES]
    assert places == sorted(places)
    assert lines[0].startswith("[0:00:0")
    assert re.search(r"rollout 1/\d .*\d:\d\d:\d\d elapsed, \d:\d\d:\d\d left", plain[1])
    assert plain[1].count("pushing the trainer's weights") == 1


def samples_of(directory, name="*"):
    files = sorted((directory / "run" / "samples").glob(f"{name}_*.jsonl"))
    return {file.name: file.read_text() for file in files}


def test_some_samples_of_every_rollout_and_evaluation_can_be_read(plain):
    files = samples_of(plain[0])
    steps = [f"eval_{step:06d}.jsonl" for step in (0, ROLLOUTS)]
    steps += [f"rollout_{step:06d}.jsonl" for step in range(ROLLOUTS)]
    assert list(files) == steps
    for name, text in files.items():
        samples = [json.loads(line) for line in text.splitlines()]
        assert len(samples) == (8 if name.startswith("eval") else 16)
        for sample in samples:
            assert sample["prompt"] and sample["response"] and sample["label"] == "x"
            assert sample["response"].endswith("<eos>") == (sample["finish_reason"] == "stop")
    compared = [json.loads(x)["mismatched_tokens"] for x in files[steps[-1]].splitlines()]
    assert compared == [0] * 8 + [None] * 8  # of the first of two optimizer steps


def test_a_checkpoint_that_is_evaluated_alone_has_the_numbers_of_its_run(
    plain, tmp_path, monkeypatch, capsys
):
    """Every flag is taken from the run, and each sample has the tokens and log-probabilities of then."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/e2e"))
    again = tmp_path / "run"
    assert main(["eval", str(plain[0] / "save"), "--run-dir", str(again)]) == 0
    report = json.loads(capsys.readouterr().out)
    records = read_jsonl(plain[0] / "run" / "metrics.jsonl")
    first, last = (record for record in records if "eval/avg@1" in record)
    assert report["rollouts_done"] == last.pop("step") == ROLLOUTS
    assert report["metrics"] == last != first
    before, after = samples_of(plain[0]), samples_of(tmp_path)
    (name,) = after
    assert after[name] == before[name] != before[f"eval_{0:06d}.jsonl"]


@pytest.mark.runs
def test_a_run_that_loses_an_engine_of_two_and_then_a_rank_has_the_same_bits(
    start, plain, data, tmp_path
):
    """Weights go by another way too. The lost requests are sent again, and nothing comes twice.

    Evaluation sets with names change nothing either.
    """

    def kill_an_engine_that_samples(process):
        log = tmp_path / "run" / "logs" / "engine_1.log"
        prefills = log.read_text().count("Prefill batch")
        wait_for(lambda: log.read_text().count("Prefill batch") > prefills)
        kill_an_engine(process)

    argv = [
        "--rollout-num-engines", "2", "--weight-sync", "distributed", "--eval-interval", "2",
        "--eval-prompt-data", "one", str(data), "two", str(data),
    ]  # fmt: skip
    output = finish(a_rank_is_lost(start, tmp_path, *argv, under_way=kill_an_engine_that_samples))
    assert "starting http://127.0.0.1" in output
    assert "rank 0 of the trainer ended by itself, or was killed" in output
    assert "the run begins from the last checkpoint" in output
    assert run_hash(output) == plain[2]
    assert exported_weights(tmp_path / "save") == exported_weights(plain[0] / "save")
    evaluated = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval/two/avg@1" in r]
    assert [r["step"] for r in evaluated] == [0, 2, ROLLOUTS]
    assert list(samples_of(tmp_path)) == [
        *(f"eval_{name}_{step:06d}.jsonl" for name in ("one", "two") for step in (0, 2, 4)),
        *(f"rollout_{step:06d}.jsonl" for step in range(ROLLOUTS)),
    ]  # fmt: skip


@pytest.mark.runs
def test_a_run_killed_in_the_middle_of_a_checkpoint_resumes_to_the_same_bits(
    start, plain, tmp_path
):
    save = tmp_path / "save"
    argv = ["--save", str(save), "--save-interval", "2", "--load", str(save)]
    argv += ["--weight-sync", "disk"]
    own = tmp_path / "run" / "weights" / "mine.safetensors"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    killed_while_saving(start, tmp_path, save, *argv)
    output = finish(start(tmp_path, *argv, "--rollout-num-engines", "2"))
    assert "resumed from" in output
    assert run_hash(output) == plain[2]
    of_the_whole_run = ("rollouts", "reward, first to last", "tokens compared bit by bit")
    rows, expected = summary(output), summary(plain[1])
    assert [rows[name] for name in of_the_whole_run] == [
        expected[name] for name in of_the_whole_run
    ]
    assert own.read_text() == "of the user"
    assert not list((tmp_path / "run").glob(".weights_*"))
    assert exported_weights(save) == exported_weights(plain[0] / "save")
    assert [r["step"] for r in metrics_of(tmp_path)] == list(range(ROLLOUTS))
    assert samples_of(tmp_path) == samples_of(plain[0], "rollout")


@pytest.mark.runs
def test_an_interrupted_run_stops_its_servers_and_had_its_directory_alone(start, tmp_path):
    process = start(tmp_path, "--num-rollout", "1000")
    wait_for(lambda: len(metrics_of(tmp_path)) >= 1)
    refused = finish(start(tmp_path), code=2)
    assert re.search(rf"--run-dir=.*: process {process.pid} on .* is writing there", refused)
    assert len(metrics_of(tmp_path)) >= 1
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in finish(process, code=130)
    wait_for(lambda: all(map(is_gone, children)), 30)


ONE_BIT_OFF = """
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training.policy_trainer import PolicyTrainer
train = PolicyTrainer.train_share
def train_with_another_softmax(self, share, outcomes, step, rates):
    if step == 1:
        log_softmax = self.operators.log_softmax
        self.operators.log_softmax = lambda x, t: log_softmax(x, t) * (1 + 2**-23)
    return train(self, share, outcomes, step, rates)
PolicyTrainer.train_share = train_with_another_softmax
"""


@pytest.mark.runs
def test_a_mismatch_stops_the_run_on_two_ranks_and_keeps_its_checkpoint(start, tmp_path):
    saves = ("--save", str(tmp_path / "save"), "--save-interval", "1")
    argv = [*TWO_RANKS, *saves, "--cpu-threads", "1"]
    output = finish(start(tmp_path, *argv, in_ranks=ONE_BIT_OFF), code=1)
    (first,) = metrics_of(tmp_path)
    assert first["parity/num_mismatched_tokens"] == 0
    failed = samples_of(tmp_path)["rollout_000001.jsonl"].splitlines()
    assert any(json.loads(line)["mismatched_tokens"] for line in failed)
    assert re.search(r"ParityError: \d+ of \d+ tokens .*step=1, prompt \d+, sample \d+", output)
    assert (tmp_path / "save" / "step_000001" / "state.json").is_file()
    assert not (tmp_path / "save" / "step_000002").exists()
