"""Each of our modules taken out alone is found: the comparison of bits sees what it must see.

In float32, but for RMS norm: there PyTorch's rounds as the aligned one does, so it is controlled in
bfloat16.
"""

import pytest
import torch
from megatron_ranks import Job, random_sequences, reference, score, score_without, with_blocks

from onpolicy.train.megatron.layout import MegatronLayout

TENSOR = MegatronLayout(tensor_model_parallel_size=2)

IN_FLOAT32 = ["column_linear", "row_linear", "attention", "rotary", "activation", "output_layer"]
OF_EXPERTS = ["router", "experts"]


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


@pytest.mark.parametrize("module", IN_FLOAT32)
def test_one_module_of_megatrons_is_found(two_ranks, dense, module):
    job, results = dense
    assert min(count_mismatches(two_ranks.run(score_without, job, module), results)) > 0


@pytest.mark.parametrize("module", OF_EXPERTS)
def test_another_router_or_other_experts_are_found(two_ranks, sparse, module):
    job, results = sparse
    assert min(count_mismatches(two_ranks.run(score_without, job, module), results)) > 0


def test_another_norm_is_found_in_bfloat16(two_ranks, model_of):
    job = Job(path=model_of("qwen3"), batches=[random_sequences(40, 90, 5)] * 2, dtype="bfloat16")
    results = reference(job)[0]
    assert count_mismatches(two_ranks.run(score, job), results) == [0, 0]
    assert min(count_mismatches(two_ranks.run(score_without, job, "norm"), results)) > 0


def test_partials_that_are_rounded_before_their_sum_are_found_in_bfloat16(two_ranks, model_of):
    job = Job(path=model_of("qwen3"), batches=[random_sequences(40, 90, 5)], dtype="bfloat16")
    job = with_blocks(job, TENSOR)
    results = reference(job)[0]
    found = count_mismatches(two_ranks.run(score_without, job, "row_linear"), results)
    assert min(found) == len(results[0][0])
    assert torch.isfinite(results[0][0]).all()
