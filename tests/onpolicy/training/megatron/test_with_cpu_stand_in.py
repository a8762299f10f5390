"""What of Megatron names CUDA, on two ranks with the stand-in that lets it mean the CPU.

The ranks are processes of their own, whatever other tests have activated in this one.
"""

from dataclasses import replace

import pytest
import torch

from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.megatron_ranks import (
    Job,
    layer_forwards,
    random_sequences,
    reference,
    score_in_stages,
    stand_in_at_start,
    step_and_reload,
    train,
    with_blocks,
)

pytestmark = pytest.mark.runs

BATCHES = [random_sequences(5, 40, 90, 2), random_sequences(33, 3, 20, 1 + 6, seed=1)]
MICRO_BATCHES = 2

DATA = MegatronLayout()
SEQUENCE = MegatronLayout(tensor_model_parallel_size=2, sequence_parallel=True)
PIPELINE = MegatronLayout(pipeline_model_parallel_size=2)
PIPELINE_RECOMPUTED = MegatronLayout(pipeline_model_parallel_size=2, recompute_activations=True)
CONTEXT = MegatronLayout(context_parallel_size=2)
EXPERTS = MegatronLayout(expert_model_parallel_size=2, recompute_activations=True)


def make_job(path, layout, dtype="float32"):
    job = with_blocks(Job(path=path, batches=BATCHES, dtype=dtype), layout)
    spread = layout in (DATA, EXPERTS)
    return job if spread else job.with_batches(BATCHES[:1])


def test_the_cpu_stand_in_is_asked_for_by_name_and_says_so(two_ranks, model_of):
    for active, refused, messages, unchanged in two_ranks.run(
        stand_in_at_start, Job(path=model_of("qwen3"), batches=[])
    ):
        assert not active
        assert "onpolicy.compat.megatron_on_cpu.activate() first" in refused
        assert unchanged
        assert messages == [
            "No CUDA here: Megatron's CUDA-named calls mean the CPU in this process "
            "(onpolicy/compat/megatron_on_cpu.py)."
        ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("qwen3", DATA), ("qwen3", SEQUENCE), ("qwen3", PIPELINE), ("qwen3-tied", PIPELINE),
        ("qwen2", SEQUENCE), ("olmo2", SEQUENCE), ("smollm3", PIPELINE), ("qwen2-moe", SEQUENCE),
        ("glm4-moe", SEQUENCE), ("glm4-moe", PIPELINE), ("qwen3-moe", SEQUENCE),
        ("qwen3-moe", PIPELINE), ("qwen3-moe", CONTEXT), ("qwen3-moe", EXPERTS),
    ],
)  # fmt: skip
def test_schedules_with_the_cpu_stand_in_give_the_bits_and_gradients_of_one_rank(
    two_ranks, model_of, architecture, layout, dtype
):
    job = make_job(model_of(architecture), layout, dtype)
    answers = two_ranks.run(train, job, MICRO_BATCHES)
    results, gradients = reference(job, MICRO_BATCHES)
    for data_rank, log_probs, entropy, _ in answers:
        assert torch.equal(log_probs, results[data_rank][0])
        assert torch.equal(entropy, results[data_rank][1])
    tolerance = 1e-5 if dtype == "float32" else 0.05
    for name, gradient in gradients.items():
        error = (answers[0][3][name].float() - gradient.float()).norm()
        assert error <= tolerance * gradient.float().norm(), name


@pytest.mark.parametrize("layout", [SEQUENCE, PIPELINE_RECOMPUTED], ids=["sequence", "pipeline"])
def test_the_rollouts_experts_with_the_cpu_stand_in_stay_with_their_micro_batch(
    two_ranks, model_of, layout
):
    job = replace(make_job(model_of("qwen3-moe"), layout), replay=True)
    answers = two_ranks.run(train, job, MICRO_BATCHES)
    results, gradients = reference(job, MICRO_BATCHES)
    for _, log_probs, *_ in answers:
        assert torch.equal(log_probs, results[0][0])
    for name, gradient in gradients.items():
        assert (answers[0][3][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_recomputation_with_the_cpu_stand_in_runs_every_layer_twice(two_ranks, model_of):
    job = Job(path=model_of("qwen3"), batches=BATCHES)
    layers = 2
    assert two_ranks.run(layer_forwards, job)[0] == layers
    again = with_blocks(job, MegatronLayout(recompute_activations=True))
    assert two_ranks.run(layer_forwards, again)[0] == 2 * layers


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize(
    ("architecture", "layout", "dtype"),
    [
        ("qwen3-moe", EXPERTS, "bfloat16"), ("qwen3-tied", PIPELINE, "float32"),
        ("olmo2", SEQUENCE, "float32"), ("qwen2-moe", SEQUENCE, "float32"),
    ],
)  # fmt: skip
def test_a_step_and_a_checkpoint_with_the_cpu_stand_in(
    two_ranks, model_of, tmp_path, architecture, layout, dtype, distributed
):
    job = make_job(model_of(architecture), layout, dtype)
    norm, before, after, read = two_ranks.run(
        step_and_reload, job, tmp_path / "sharded", distributed
    )[0]
    _, gradients = reference(job)
    want = sum(g.double().square().sum() for g in gradients.values()) ** 0.5
    assert norm == pytest.approx(float(want), rel=1e-5 if dtype == "float32" else 0.02)
    assert before.keys() == after.keys() == read.keys()
    for name, weight in after.items():
        assert not torch.equal(weight, before[name]), name
        assert torch.equal(weight, read[name]), name


def test_every_stage_learns_what_the_last_computed_with_the_cpu_stand_in(two_ranks, model_of):
    job = make_job(model_of("qwen3"), PIPELINE)
    answers = two_ranks.run(score_in_stages, job)
    (*first, drawn, digests), (*last, also_drawn, also_digests) = answers
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert drawn.isnan().all() and also_drawn.isnan().all()  # nothing was to be drawn again
    assert digests.dtype == also_digests.dtype == torch.int64
    assert not (digests.any() or also_digests.any())
