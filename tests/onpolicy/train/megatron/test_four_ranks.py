"""Several kinds of parallelism at once, on four ranks."""

import pytest
import torch

from onpolicy.train.megatron.layout import MegatronLayout
from tests.support.megatron_ranks import Job, random_sequences, reference, score, train, with_blocks
from tests.support.tiny import make_checkpoint

BATCHES = [random_sequences(5, 40, 91, 2), random_sequences(33, 3, seed=1)]


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
def test_log_probs_have_the_bits_of_one_rank(four_ranks, tmp_path, sizes, dtype):
    path = make_checkpoint(tmp_path, "qwen3", num_key_value_heads=4)
    job = with_blocks(Job(path=path, batches=BATCHES[:1], dtype=dtype), MegatronLayout(**sizes))
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
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "context_parallel_size": 2,
                "expert_model_parallel_size": 2,
                "moe_token_dispatcher_type": "allgather",
                "recompute_activations": True,
            },
            1,
        ),
        ({"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 1),
    ],
    ids=["tensor and experts", "tensor, context and experts", "tensor and pipeline"],
)
def test_experts_with_the_cpu_stand_in_give_the_bits_and_gradients_of_one_rank(
    four_ranks, model_of, sizes, ranks_of_data
):
    job = Job(path=model_of("qwen3-moe"), batches=BATCHES[:ranks_of_data])
    job = with_blocks(job, MegatronLayout(**sizes))
    answers = four_ranks.run(train, job, 2)
    results, gradients = reference(job, 2)
    require_equal_log_probs(answers, results)
    for name, gradient in gradients.items():
        assert (answers[0][3][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
