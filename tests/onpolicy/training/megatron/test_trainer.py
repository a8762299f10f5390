"""Megatron's engine against FSDP2's, in real groups of ranks; the rollout is in tests/e2e."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.crafted_checkpoints import ATTACKS, in_the_common_state
from tests.support.megatron_training import (
    Job,
    equal,
    left_after_saving,
    load_crafted,
    load_crafted_with_megatrons_readers,
    save_on_a_full_disk,
    train,
    train_on_a_wrong_one,
    train_on_drawn,
    train_with_frozen,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.long

LAYOUTS = {
    "data": {},
    "tensor": {"megatron_tp": 2},
    "tensor and sequence": {"megatron_tp": 2, "megatron_sequence_parallel": True},
    "context": {"megatron_cp": 2},
    "pipeline": {"megatron_pp": 2},
}
MIS = {
    "use_tis": True, "use_rs": True, "tis_level": "sequence", "rs_level": "geometric",
    "tis_upper_bound": 1.05, "tis_batch_normalize": True,
}  # fmt: skip
SMOOTH = {"trainer": {"adam_eps": 1e-2}}
"""With the default AdamW gives a gradient that is nothing but rounding a step of the whole rate."""
FALLS_BACK = {"parity": {"parity_policy": "fallback"}, "fallback": MIS}


@pytest.fixture(scope="module")
def job(checkpoint):
    return Job(path=checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Two steps of the other engine on one rank."""
    return train(Job(path=checkpoint, backend="fsdp", changes=SMOOTH))


# The engines round other sums of gradients to bfloat16: on a CPU with AMX their norms differ by 1.01e-4.
@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 5e-4)])
def test_alone_its_first_step_is_the_other_engines(one_rank, checkpoint, dtype, close):
    [(log_probs, metrics, weights)] = one_rank.run(train, Job(path=checkpoint, dtype=dtype), 1)
    theirs = train(Job(path=checkpoint, backend="fsdp", dtype=dtype), 1)
    assert log_probs == theirs[0]
    assert metrics[0]["parity/num_mismatched_tokens"] == 0
    for name in ("train/loss", "train/entropy", "train/lr"):
        assert metrics[0][name] == theirs[1][0][name]
    norm = theirs[1][0]["train/grad_norm"]
    assert metrics[0]["train/grad_norm"] == pytest.approx(norm, rel=close)
    assert weights.keys() == theirs[2].keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_it_trains_as_the_other_engine(two_ranks, job, reference, layout):
    results = two_ranks.run(train, job.under(LAYOUTS[layout], **SMOOTH))
    assert results[1][0] == results[0][0]  # on all ranks alike
    require_same_steps(results[0], reference)


@pytest.mark.parametrize("architecture", ["smollm3", "olmo2", "mixtral", "qwen2-moe", "glm4-moe"])
def test_of_every_family_it_trains_as_the_other_engine(one_rank, model_of, architecture):
    job = Job(path=model_of(architecture), changes=SMOOTH)
    [results] = one_rank.run(train, job)
    require_same_steps(results, train(replace(job, backend="fsdp")))


def require_same_steps(results, reference):
    log_probs, metrics, weights = results
    assert log_probs[0] == reference[0][0]
    assert weights.keys() == reference[2].keys()
    for ours, theirs in zip(metrics, reference[1], strict=True):
        assert ours["parity/num_mismatched_tokens"] == 0
        assert ours["parity/num_compared_tokens"] == theirs["parity/num_compared_tokens"]
        assert ours["train/lr"] == theirs["train/lr"]
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    for name, tensor in reference[2].items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=5e-7)


@pytest.mark.parametrize("layout", ["data", "context", "pipeline"])
def test_one_wrong_log_prob_stops_before_the_backward_pass(two_ranks, job, layout):
    results = two_ranks.run(train_on_a_wrong_one, job.under(LAYOUTS[layout]))
    for error, *_ in results:
        assert "1 of" in error and "step=7, prompt 0, sample 0, response position=0" in error
    _, _, before, after = results[0]
    assert before and equal(before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_tokens_are_drawn_again_and_an_engine_that_draws_otherwise_is_found(
    two_ranks, job, checkpoint, layout
):
    """The rows of log-probabilities have the digests of one rank of FSDP."""
    full = {"parity": {"parity_check": "full"}}
    *_, expected = train_on_drawn(Job(path=checkpoint, backend="fsdp", changes=full))
    assert all(all(each) for each in expected)
    for metrics, error, digests in two_ranks.run(
        train_on_drawn, job.under(LAYOUTS[layout], **full)
    ):
        assert digests == expected
        assert metrics["parity/num_compared_rows"] == 15
        assert metrics["parity/num_mismatched_rows"] == 0
        found = [
            metrics[f"parity/num_{x}_tokens"] for x in ("redrawn", "drawn_otherwise", "excused")
        ]
        assert found == [15, 0, 0] and metrics["parity/num_mismatched_tokens"] == 0
        assert "tokens that were drawn again are others than the rollout's" in error
        assert "prompt 1, sample 0, response position=" in error and "sampling_seed=203" in error


@pytest.mark.parametrize("layout", ["context", "pipeline"])
def test_a_sequence_level_correction_is_that_of_one_rank(two_ranks, job, checkpoint, layout):
    error, metrics, before, after = two_ranks.run(
        train_on_a_wrong_one, job.under(LAYOUTS[layout], **FALLS_BACK)
    )[0]
    alone = Job(path=checkpoint, backend="fsdp", changes=FALLS_BACK)
    _, expected, _, _ = train_on_a_wrong_one(alone)
    corrected = [n for n in expected if n.startswith(("mismatch/", "correction/", "parity/"))]
    assert error is None and metrics["parity/num_fallbacks"] == 1
    assert metrics["correction/truncated_fraction"] > 0
    assert {n: metrics[n] for n in corrected} == {n: expected[n] for n in corrected}
    assert not equal(before, after)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_behind_a_tied_embedding_that_stages_share_each_weight_is_read_in_its_place(
    two_ranks, model_of, tmp_path, dtype
):
    """The embedding has a bucket of its own, with padding."""
    job = Job(path=model_of("qwen3-tied"), dtype=dtype).under(LAYOUTS["pipeline"])
    _, _, weights = two_ranks.run(train, job, 2, tmp_path)[0]
    _, _, loaded = two_ranks.run(train, job, 2, None, tmp_path)[0]
    assert equal(loaded, weights)


def test_a_checkpoint_may_be_loaded_in_another_layout(two_ranks, job, tmp_path):
    log_probs, _, _ = two_ranks.run(train, job.under(LAYOUTS["tensor"]), 2, tmp_path)[0]
    resumed, metrics, _ = two_ranks.run(train, job.under(LAYOUTS["pipeline"]), 2, None, tmp_path)[0]
    assert resumed[0] == log_probs[1]
    assert metrics[0]["parity/num_mismatched_tokens"] == 0


def test_a_save_leaves_no_process(one_rank, job, tmp_path):
    """As one that keeps Megatron's queue would: with PyTorch, beside each rank."""
    assert one_rank.run(left_after_saving, job, tmp_path) == [[]]


def test_two_runs_give_the_same_weights(two_ranks, job):
    job = job.under(LAYOUTS["tensor and sequence"])
    first, second = (two_ranks.run(train, job)[0][2] for _ in range(2))
    assert first and equal(first, second)


@pytest.mark.parametrize("size", [50, 20_000, 500_000])
def test_a_full_disk_is_an_error(one_rank, job, tmp_path, size):
    """In a checkpoint's common state, index, or tensors."""
    assert all(one_rank.run(save_on_a_full_disk, job, tmp_path, size))


CRAFTED = {**ATTACKS, in_the_common_state: r"\(common.pt holds more than data\)"}


@pytest.mark.parametrize("attack", CRAFTED, ids=lambda attack: attack.__name__)
def test_code_hidden_in_a_checkpoint_is_not_run(one_rank, checkpoint, tmp_path, attack):
    [(error, ran)] = one_rank.run(load_crafted, Job(path=checkpoint), tmp_path, attack)
    assert re.match(rf"CheckpointError: .*{CRAFTED[attack]}", error)
    assert not ran


@pytest.mark.parametrize("attack", CRAFTED, ids=lambda attack: attack.__name__)
def test_code_hidden_in_a_checkpoint_is_run_by_megatrons_readers(
    one_rank, checkpoint, tmp_path, attack
):
    """So the test above would notice."""
    job = Job(path=checkpoint)
    [(_, ran)] = one_rank.run(load_crafted_with_megatrons_readers, job, tmp_path, attack)
    assert ran


@pytest.mark.runs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_a_trainer_that_left_its_device_learns_the_same_bits(two_ranks, checkpoint, layout, dtype):
    job = Job(path=checkpoint, dtype=dtype).under(LAYOUTS[layout])
    (stays, *_), (leaves, *_) = (
        two_ranks.run(train, job, 3, None, None, 1, x) for x in (False, True)
    )
    assert leaves[0] == stays[0]
    for ours, theirs in zip(leaves[1], stays[1], strict=True):
        assert ours["train/loss"] == theirs["train/loss"]
        assert ours["train/grad_norm"] == theirs["train/grad_norm"]
    assert equal(leaves[2], stays[2])


def is_frozen(name):
    return "layers.0.mlp.gate_proj" in name or "layers.0.mlp.up_proj" in name or "embed" in name


@pytest.fixture(scope="module")
def frozen_reference(checkpoint):
    """The other engine's, on one rank."""
    return train_with_frozen(Job(path=checkpoint, backend="fsdp", changes=SMOOTH))


@pytest.mark.runs
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_only_what_is_trained_moves_and_as_in_the_other_engine(
    two_ranks, job, frozen_reference, layout
):
    under = job.under(LAYOUTS[layout], **SMOOTH)
    before = two_ranks.run(train, under, 0)[0][2]
    results = two_ranks.run(train_with_frozen, under)
    require_same_steps(results[0][:3], frozen_reference[:3])
    after = results[0][2]
    assert any(map(is_frozen, before)) and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == is_frozen(name), name
    for *_, digests in results:
        assert len(digests) == 4 and len(set(digests)) == 1


@pytest.mark.runs
def test_it_goes_on_with_the_same_bits_where_a_weight_is_frozen_in_some_layers_only(
    two_ranks, job, tmp_path
):
    under = job.under(LAYOUTS["pipeline"], **SMOOTH)
    whole = two_ranks.run(partial(train_with_frozen, save=tmp_path), under)[0]
    resumed = two_ranks.run(partial(train_with_frozen, load=tmp_path), under)[0]
    assert resumed[0] == whole[0][1:]
    assert equal(resumed[2], whole[2])
