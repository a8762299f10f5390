"""Ranks of Megatron against the Hugging Face model on one: the same bits, whatever is shared.

Nothing here needs CUDA names. Sequences have odd lengths, the vocabulary does not divide, and
several sequences share a micro-batch.
"""

from dataclasses import replace

import pytest
import torch

from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.megatron_ranks import (
    Job,
    differentiate,
    random_sequences,
    reference,
    score,
    train,
    with_blocks,
)
from tests.support.tiny import make_checkpoint

DENSE = ["qwen3", "qwen3-tied", "qwen2", "llama", "mistral", "smollm3", "olmo2"]
SPARSE = ["qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe"]
BATCHES = [random_sequences(5, 40, 90, 2), random_sequences(33, 3, seed=1)]

DATA = MegatronLayout()
TENSOR = MegatronLayout(tensor_model_parallel_size=2)
CONTEXT = MegatronLayout(context_parallel_size=2)
EXPERTS = MegatronLayout(expert_model_parallel_size=2)
EXPERTS_CONTEXT = MegatronLayout(expert_model_parallel_size=2, context_parallel_size=2)


def make_job(path, layout, dtype):
    job = Job(path=path, batches=BATCHES, dtype=dtype)
    job = with_blocks(job, layout)
    return job if data_parallel(layout) else job.with_batches(BATCHES[:1])


def data_parallel(layout):
    return layout.tensor_model_parallel_size * layout.context_parallel_size == 1


def require_equal_scores(answers, results):
    for data_rank, log_probs, entropy, *_ in answers:
        want_log_probs, want_entropy = results[data_rank]
        assert log_probs.isfinite().all()
        assert torch.equal(log_probs, want_log_probs)
        assert torch.equal(entropy, want_entropy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [DATA, TENSOR, CONTEXT], ids=["data", "tensor", "context"])
@pytest.mark.parametrize("architecture", [*DENSE, "qwen2-window", *SPARSE])
def test_log_probs_have_the_bits_of_one_rank(two_ranks, model_of, architecture, layout, dtype):
    job = make_job(model_of(architecture), layout, dtype)
    require_equal_scores(two_ranks.run(score, job), reference(job)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [EXPERTS, EXPERTS_CONTEXT], ids=["experts", "context"])
def test_experts_of_other_ranks_give_the_bits_of_one_rank(two_ranks, model_of, layout, dtype):
    job = make_job(model_of("qwen3-moe"), layout, dtype)
    require_equal_scores(two_ranks.run(score, job), reference(job)[0])


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("qwen3", DATA), ("qwen3", TENSOR), ("qwen3", CONTEXT), ("qwen3-tied", TENSOR),
        ("qwen2", TENSOR), ("smollm3", TENSOR), ("olmo2", TENSOR), ("qwen3-moe", TENSOR),
        ("qwen3-moe", CONTEXT), ("qwen3-moe", EXPERTS), ("qwen3-moe", EXPERTS_CONTEXT),
        ("mixtral", EXPERTS), ("qwen2-moe", TENSOR),
        ("qwen2-moe", EXPERTS), ("glm4-moe", TENSOR), ("glm4-moe", EXPERTS),
    ],
)  # fmt: skip
def test_gradients_are_those_of_one_rank(two_ranks, model_of, architecture, layout):
    job = make_job(model_of(architecture), layout, "float32")
    answers = two_ranks.run(differentiate, job)
    results, gradients = reference(job)
    require_equal_scores(answers, results)
    require_close_gradients(answers[0][3], gradients)


@pytest.mark.parametrize(
    "layout", [DATA, TENSOR, CONTEXT, EXPERTS], ids=["data", "tensor", "context", "experts"]
)
def test_routers_take_the_rollouts_experts_and_tokens_are_from_what_it_kept(
    two_ranks, model_of, layout
):
    own = make_job(model_of("qwen3-moe"), layout, "float32")
    routed = replace(own, replay=True)
    job = replace(routed, kept=True)
    answers = two_ranks.run(differentiate, job)
    results, gradients = reference(job)
    require_equal_scores(answers, results)
    require_close_gradients(answers[0][3], gradients)
    of_routed, of_own = (reference(each)[0][0][0] for each in (routed, own))
    assert not torch.equal(results[0][0], of_routed) and not torch.equal(of_routed, of_own)


def require_close_gradients(got, want):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=0, atol=1e-5 * gradient.norm().item(), msg=name
        )


FOUR_BATCHES = [random_sequences(5, 40, 91, 2), random_sequences(33, 3, seed=1)]


def require_equal_log_probs(answers, results):
    for data_rank, log_probs, *_ in answers:
        assert torch.equal(log_probs, results[data_rank][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 4},
        {"context_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    ],
    ids=["tensor", "context", "both"],
)
def test_log_probs_on_four_ranks_have_the_bits_of_one(four_ranks, tmp_path, sizes, dtype):
    path = make_checkpoint(tmp_path, "qwen3", num_key_value_heads=4)
    job = with_blocks(
        Job(path=path, batches=FOUR_BATCHES[:1], dtype=dtype), MegatronLayout(**sizes)
    )
    require_equal_log_probs(four_ranks.run(score, job), reference(job)[0])


@pytest.mark.parametrize(
    ("sizes", "ranks_of_data"),
    [
        (
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_model_parallel_size": 2,
            },
            2,
        ),
        (
            {
                "tensor_model_parallel_size": 2, "sequence_parallel": True,
                "context_parallel_size": 2, "expert_model_parallel_size": 2,
                "recompute_activations": True,
            },
            1,
        ),
        ({"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 1),
    ],
    ids=["tensor and experts", "tensor, context and experts", "tensor and pipeline"],
)  # fmt: skip
def test_experts_with_the_cpu_stand_in_give_the_bits_and_gradients_of_one_rank(
    four_ranks, model_of, sizes, ranks_of_data
):
    job = Job(path=model_of("qwen3-moe"), batches=FOUR_BATCHES[:ranks_of_data])
    job = with_blocks(job, MegatronLayout(**sizes))
    answers = four_ranks.run(train, job, 2)
    results, gradients = reference(job, 2)
    require_equal_log_probs(answers, results)
    for name, gradient in gradients.items():
        assert (answers[0][3][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
