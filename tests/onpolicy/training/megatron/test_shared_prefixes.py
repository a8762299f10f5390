"""Prefixes computed once under Megatron: the bits of whole sequences, and the same sum of gradients."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from onpolicy.ops.shared_rows import SharedRows
from onpolicy.training.megatron.rank_layout import MegatronLayout
from tests.support.megatron_ranks import Job, random_sequences, reference, train, with_blocks

PROMPT, OTHER, A, B, C = random_sequences(70, 42, 30, 9, 5)
BATCHES = [
    [*(PROMPT + tail for tail in (A, B, C, A)), OTHER + A, OTHER + B],
    [PROMPT + A + B, PROMPT + A, PROMPT + A + C, PROMPT + A + C + B],
]

LAYOUTS = {
    "sequence": MegatronLayout(tensor_model_parallel_size=2, sequence_parallel=True),
    "stages": MegatronLayout(pipeline_model_parallel_size=2),
    "experts": MegatronLayout(expert_model_parallel_size=2),
}


def make_jobs(path, layout, **more):
    """The same job of whole sequences, and of those that share their beginnings."""
    batches = BATCHES if layout.expert_model_parallel_size > 1 else BATCHES[:1]
    whole = with_blocks(Job(path=path, batches=batches, **more), layout)
    return whole, replace(whole, shares_prefixes=True)


def counting_once(job):
    """As `train`, where a row that was read several times gets the gradient of its last reading."""

    def add_up(self, grad, count):
        total = grad.new_zeros(count, *grad.shape[1:])
        total[self.rows] = grad
        return total

    with patch.object(SharedRows, "add_up", add_up):
        return train(job)


def distance(ours, theirs):
    """Of the gradients of all weights, as a share of their norm."""
    apart = torch.stack([(ours[name] - x).norm() for name, x in theirs.items()])
    return float(apart.norm() / torch.stack([x.norm() for x in theirs.values()]).norm())


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3", "sequence"), ("qwen2-window", "stages"), ("qwen3-moe", "experts")],
)
def test_log_probs_have_the_bits_of_whole_sequences_and_gradients_are_the_same_sum(
    two_ranks, model_of, architecture, layout
):
    whole, shared = make_jobs(model_of(architecture), LAYOUTS[layout])
    rows = len(shared.packed(0).tokens)  # an odd number, so that sequence parallelism fills up
    assert rows % 2 == 1 and rows < len(whole.packed(0).tokens) / 2
    *_, theirs = two_ranks.run(train, whole)[0]
    answers, again = (two_ranks.run(train, shared) for _ in range(2))
    results, _ = reference(whole)
    for rank, log_probs, entropy, _ in answers:
        assert torch.equal(log_probs, results[rank][0])
        assert torch.equal(entropy, results[rank][1])
    ours = answers[0][3]
    assert 0 < distance(ours, theirs) < 1e-6
    assert all(torch.equal(again[0][3][name], x) for name, x in ours.items())
    assert distance(two_ranks.run(counting_once, shared)[0][3], theirs) > 1e-2
