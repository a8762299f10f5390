"""What tensor-parallel ranks share, put together: here of one rank, whose vocabulary is padded."""

import pytest
import torch
import torch.distributed as dist

from onpolicy.explain.together import ADDED, OverTensorRanks
from onpolicy.train import distributed

VOCABULARY, PADDED = 5, 8


@pytest.fixture
def head():
    distributed.init_process_group()
    return OverTensorRanks(ADDED, dist.group.WORLD, columns=VOCABULARY)


def test_nothing_of_the_padding_of_a_vocabulary_is_left(head):
    """Not in logits, nor in what an adapter adds to them, nor in what is held for either."""
    hidden, logits = torch.randn(1, 3, 4), torch.randn(1, 3, PADDED)
    weight, bias = torch.randn(PADDED, 4), torch.randn(PADDED)
    assert torch.equal(head.given("linear", (hidden, weight))[0], hidden)
    assert torch.equal(head.made("linear", logits), logits[..., :VOCABULARY])
    _, *held = head.held("linear", (hidden, weight, bias))
    assert [len(each) for each in held] == [VOCABULARY, VOCABULARY]
    added = (logits, logits + 1, 0.5)
    given = head.given("add_scaled", added)
    assert all(torch.equal(a, b[..., :VOCABULARY]) for a, b in zip(given[:2], added, strict=False))
    assert torch.equal(head.made("add_scaled", logits), logits[..., :VOCABULARY])
