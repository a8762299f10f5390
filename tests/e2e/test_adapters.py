"""Runs of adapters that lose an engine or a rank, are resumed, or have other ranks, under both training
engines; and what becomes of their adapters."""

import functools
import json
import re

import pytest

from onpolicy.cli.main import main
from tests.support.train_runs import (
    ROLLOUTS,
    a_rank_is_lost,
    finish,
    kill_an_engine,
    killed_while_saving,
    run_hash,
    summary,
)

pytestmark = [pytest.mark.engine, pytest.mark.runs]

LORA = ("--lora-rank", "8")
ONE_THREAD = ("--cpu-threads", "1")


def adapters_of(save, done=ROLLOUTS):
    return (save / f"step_{done:06d}/hf/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """Makes an undisturbed run, once: (where it saved, hash)."""

    @functools.cache
    def make(backend, ranks=1, *more):
        directory = tmp_path_factory.mktemp(f"{backend}{ranks}")
        save = directory / "save"
        argv = [*under(backend, ranks), *more, "--save", str(save), "--save-interval", "2"]
        output = finish(start(directory, *LORA, *argv))
        assert summary(output)["tokens mismatched"] == "0"
        return save, run_hash(output)

    return make


@pytest.fixture(scope="module")
def plain(run):
    return run("fsdp")


def under(backend, ranks=1):
    """The flags of so many ranks of a training engine."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    return ["--train-backend", backend, "--actor-num-ranks-per-node", str(ranks), *ONE_THREAD]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_three_ranks_that_lose_an_engine_and_one_of_them_have_the_bits_of_one_undisturbed(
    start, run, tmp_path, backend
):
    save, expected = run(backend)
    argv = [*LORA, *under(backend, 3), "--rollout-num-engines", "2"]
    output = finish(a_rank_is_lost(start, tmp_path, *argv, under_way=kill_an_engine))
    assert "starting http://127.0.0.1" in output
    assert re.search(r"rank \d of the trainer ended by itself, or was killed", output)
    assert "the run begins from the last checkpoint" in output
    assert run_hash(output) == expected
    assert adapters_of(tmp_path / "save") == adapters_of(save)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_resumed_run_ends_as_the_undisturbed_one(start, run, tmp_path, backend):
    """On other ranks, too."""
    save, (before, expected) = tmp_path / "save", run(backend)
    argv = ["--load", str(before / "step_000002"), "--save", str(save), "--save-interval", "2"]
    output = finish(start(tmp_path, *LORA, *under(backend, 2), *argv))
    assert "resumed from" in output
    assert run_hash(output) == expected
    assert adapters_of(save) == adapters_of(before) != adapters_of(before, 2)


def test_a_run_killed_in_the_middle_of_a_checkpoint_resumes_to_the_same_bits(
    start, plain, tmp_path
):
    save = tmp_path / "save"
    argv = [*LORA, *ONE_THREAD, "--save", str(save), "--save-interval", "2", "--load", str(save)]
    killed_while_saving(start, tmp_path, save, *argv)
    output = finish(start(tmp_path, *argv))
    assert "resumed from" in output
    assert run_hash(output) == plain[1]
    assert adapters_of(save) == adapters_of(plain[0])


def test_with_another_scale_a_run_has_other_bits(start, plain, tmp_path):
    assert run_hash(finish(start(tmp_path, *LORA, "--lora-alpha", "16"))) != plain[1]


def test_a_merged_checkpoint_is_served_and_both_engines_agree_on_it(
    plain, checkpoint, tmp_path, capsys
):
    merged, adapter = str(tmp_path / "merged"), str(plain[0] / "step_000004/hf")
    argv = ["export", "--hf-checkpoint", str(checkpoint), "--merge", adapter]
    assert main([*argv, "--dtype", "bfloat16", "--output", merged]) == 0
    assert "linears merged" in capsys.readouterr().out
    argv = ["verify", "--hf-checkpoint", merged, "--num-prompts", "4", "--max-new-tokens", "12"]
    assert main([*argv, "--no-step", "--run-dir", str(tmp_path / "run")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_compared_tokens"] == 2 * 4 * 12 and not report["num_mismatched_tokens"]
