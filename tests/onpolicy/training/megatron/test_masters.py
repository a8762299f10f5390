"""A Megatron trainer that computes with rounded weights, against FSDP2's on one rank."""

from dataclasses import replace

import pytest
import torch

from onpolicy.models.weight_files import CheckpointReader
from tests.support.megatron_training import Job, equal, make, make_samples, train, weights
from tests.support.rounded import deployed

pytest.importorskip("megatron.core")

RATE = 1e-3

CASES = {
    "tensor": ("qwen3", "int3", "float32", {"megatron_tp": 2}),
    "tensor, groups, sequence": (
        "qwen3", "int4_group128", "bfloat16", {"megatron_tp": 2, "megatron_sequence_parallel": True}
    ),
    "tensor, blocks": (
        "qwen3", "fp8_e4m3_block128", "bfloat16",
        {"megatron_tp": 2},
    ),
    "pipeline": ("qwen3", "int4_group128", "bfloat16", {"megatron_pp": 2}),
    "experts": ("qwen3-moe", "int3", "float32", {"megatron_ep": 2}),
    "experts, tensor": ("qwen2-moe", "int4", "bfloat16", {"megatron_tp": 2}),
}  # fmt: skip
"""Models whose matrices are cut where no group or block ends."""


def job_of(model_of, case):
    model, weight_format, dtype, layout = CASES[case]
    changes = {"engine": {"rollout_weight_format": weight_format}}
    return Job(path=model_of(model), dtype=dtype, changes=changes).under(layout)


def held(trainer):
    buckets = trainer.policy.weight_buckets(1 << 30, masters=True)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def learn(job, cut=False, stale=False):
    """What is pushed, log-probabilities, metrics, what is pushed after a step, and masters of then.

    `cut`: each tensor-parallel rank rounds its own part; `stale`: nothing is rounded after the step.
    """
    from onpolicy.training.megatron import megatron_optimizer as masters

    with pytest.MonkeyPatch.context() as patch:
        if cut:
            repeated = lambda x, group: torch.cat([x] * group.size())  # noqa: E731
            patch.setattr(masters, "gather_rows", repeated)
        trainer = make(job)
        before, samples = weights(trainer), make_samples(trainer)
        if stale:
            patch.setattr(masters.Masters, "round", lambda self: None)
        metrics = trainer.train(samples, 0, [RATE]).metrics
        log_probs = [each.rollout_log_probs for each in samples]
        return before, log_probs, metrics, weights(trainer), held(trainer)


@pytest.mark.parametrize("case", CASES)
def test_what_it_computes_with_are_the_bits_of_the_other_engine(two_ranks, model_of, case):
    job = job_of(model_of, case)
    before, log_probs, metrics, after, masters = two_ranks.run(learn, job)[0]
    theirs = make(replace(job, backend="fsdp"))
    assert equal(before, weights(theirs))
    assert log_probs == [each.rollout_log_probs for each in make_samples(theirs)]
    assert metrics["parity/num_mismatched_tokens"] == 0 < metrics["parity/num_compared_tokens"]
    assert equal(after, deployed(masters, CASES[case][1], *[getattr(torch, job.dtype)] * 2))
    assert not equal(after, before)
    stored = CheckpointReader(str(job.path))
    steps = [master.float() - stored.read(name, ()).float() for name, master in masters.items()]
    assert 0 < max(float(step.abs().max()) for step in steps) < 4 * RATE  # not from rounded weights


@pytest.mark.parametrize("case", ["tensor, groups, sequence", "experts, tensor"])
def test_scales_that_tensor_parallelism_cuts_are_noticed(two_ranks, model_of, case):
    job = job_of(model_of, case)
    before, log_probs, *_ = two_ranks.run(learn, job, True)[0]
    theirs = make(replace(job, backend="fsdp"))
    assert not equal(before, weights(theirs))
    assert log_probs != [each.rollout_log_probs for each in make_samples(theirs)]


def test_rounded_weights_of_before_a_step_are_noticed(two_ranks, model_of):
    job = job_of(model_of, "tensor")
    *_, after, masters = two_ranks.run(learn, job, False, True)[0]
    assert not equal(after, deployed(masters, "int3", *[torch.float32] * 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_the_masters_for_any_layout(two_ranks, model_of, tmp_path, dtype):
    job = replace(job_of(model_of, "tensor"), dtype=dtype)
    log_probs, _, pushed = two_ranks.run(train, job, 2, tmp_path)[0]
    resumed, _, again = two_ranks.run(train, job, 2, None, tmp_path)[0]
    assert resumed == log_probs[1:] and equal(again, pushed)
    elsewhere, *_ = two_ranks.run(train, job.under({"megatron_pp": 2}), 2, None, tmp_path)[0]
    assert elsewhere == log_probs[1:]
