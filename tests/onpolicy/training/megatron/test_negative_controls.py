"""Each of our modules off by one bit alone is found: the comparison sees what it must see."""

import pytest

from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.megatron_ranks import (
    Job,
    random_sequences,
    reference,
    score,
    score_broken,
    with_blocks,
)

TENSOR = MegatronLayout(tensor_model_parallel_size=2)

OF_DENSE_MODELS = [
    "column_linear", "row_linear", "norm", "attention", "rotary", "gated", "output_layer",
]  # fmt: skip
OF_EXPERTS = ["router", "experts"]
OF_ONE_FAMILY = [
    ("smollm3", "rotated_everywhere"), ("olmo2", "joined_norm"), ("olmo2", "norm_after"),
    ("mixtral", "router"), ("qwen2-moe", "whole_linear"), ("qwen2-moe", "shared_expert"),
    ("glm4-moe", "router"), ("glm4-moe", "rotated_part"), ("glm4-moe", "shared_expert"),
]  # fmt: skip


def count_mismatches(answers, results):
    return [int((log_probs != results[rank][0]).sum()) for rank, log_probs, _ in answers]


@pytest.fixture(scope="module")
def dense(model_of):
    job = Job(path=model_of("qwen3"), batches=[random_sequences(40, 90, 5)])
    job = with_blocks(job, TENSOR)
    return job, reference(job)[0]


@pytest.fixture(scope="module")
def sparse(model_of):
    job = Job(path=model_of("qwen3-moe"), batches=[random_sequences(40, 90, 5)] * 2)
    return job, reference(job)[0]


def test_with_all_modules_nothing_differs(two_ranks, dense, sparse):
    for job, results in (dense, sparse):
        assert count_mismatches(two_ranks.run(score, job), results) == [0, 0]


@pytest.mark.parametrize("module", OF_DENSE_MODELS)
def test_one_broken_module_is_found(two_ranks, dense, module):
    job, results = dense
    assert min(count_mismatches(two_ranks.run(score_broken, job, module), results)) > 0


@pytest.mark.parametrize("module", OF_EXPERTS)
def test_a_broken_router_or_broken_experts_are_found(two_ranks, sparse, module):
    job, results = sparse
    assert min(count_mismatches(two_ranks.run(score_broken, job, module), results)) > 0


@pytest.mark.parametrize(("architecture", "module"), OF_ONE_FAMILY)
def test_a_broken_module_of_one_family_is_found(two_ranks, model_of, architecture, module):
    job = Job(path=model_of(architecture), batches=[random_sequences(40, 90, 5)])
    job = with_blocks(job, TENSOR)
    results = reference(job)[0]
    assert min(count_mismatches(two_ranks.run(score_broken, job, module), results)) > 0


def test_partials_that_are_rounded_before_their_sum_are_found_in_bfloat16(two_ranks, model_of):
    job = Job(path=model_of("qwen3"), batches=[random_sequences(40, 90, 5)], dtype="bfloat16")
    job = with_blocks(job, TENSOR)
    results = reference(job)[0]
    assert count_mismatches(two_ranks.run(score, job), results) == [0, 0]
    found = count_mismatches(two_ranks.run(score_broken, job, "rounded_parts"), results)
    assert min(found) > 0
