"""A run of adapters that loses an engine and a rank, and what becomes of its adapters.

Checkpoints of adapters on other ranks: tests/onpolicy/training/test_rank_invariance.py.
"""

import json
import re

import pytest

from onpolicy.cli.main import main
from onpolicy.training.policy_trainer import PolicyTrainer
from tests.support.train_runs import (
    ROLLOUTS,
    a_rank_is_lost,
    finish,
    kill_an_engine,
    run_hash,
    summary,
)

pytestmark = [pytest.mark.engine, pytest.mark.runs]

MEGATRON = (
    "--lora-rank", "8", "--train-backend", "megatron", "--cpu-threads", "1",
    "--actor-num-ranks-per-node",
)  # fmt: skip
"""The number of ranks follows."""


def adapters_of(save):
    return (save / f"step_{ROLLOUTS:06d}/hf/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """A run of one rank: (where it saved, hash)."""
    pytest.importorskip("megatron.core")
    directory = tmp_path_factory.mktemp("undisturbed")
    save = directory / "save"
    argv = [*MEGATRON, "1", "--save", str(save), "--save-interval", "2"]
    output = finish(start(directory, *argv))
    assert summary(output)["tokens mismatched"] == "0"
    return save, run_hash(output)


def test_three_ranks_that_lose_an_engine_and_one_of_them_have_the_bits_of_one_undisturbed(
    start, undisturbed, tmp_path
):
    """Under FSDP a run with all its weights does: test_training.py."""
    save, expected = undisturbed
    argv = [*MEGATRON, "3", "--rollout-num-engines", "2"]
    output = finish(a_rank_is_lost(start, tmp_path, *argv, under_way=kill_an_engine))
    assert "starting http://127.0.0.1" in output
    assert re.search(r"rank \d of the trainer ended by itself, or was killed", output)
    assert "the run begins from the last checkpoint" in output
    assert run_hash(output) == expected
    assert adapters_of(tmp_path / "save") == adapters_of(save)


def test_a_merged_checkpoint_is_served_and_both_engines_agree_on_it_without_a_step(
    undisturbed, checkpoint, tmp_path, capsys, monkeypatch
):
    merged, adapter = str(tmp_path / "merged"), str(undisturbed[0] / "step_000004/hf")
    argv = ["export", "--hf-checkpoint", str(checkpoint), "--merge", adapter]
    assert main([*argv, "--dtype", "bfloat16", "--output", merged]) == 0
    assert "linears merged" in capsys.readouterr().out
    monkeypatch.setattr(PolicyTrainer, "train", lambda *_: pytest.fail("a step was taken"))
    argv = ["verify", "--hf-checkpoint", merged, "--num-prompts", "4", "--max-new-tokens", "12"]
    assert main([*argv, "--no-step", "--run-dir", str(tmp_path / "run")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_compared_tokens"] == 2 * 4 * 12
    assert report["num_mismatched_tokens"] == report["optimizer_steps"] == 0
