"""The exchange of gradient buffers, rank by rank; whole trainers are in ../test_rank_invariance.py."""

from functools import reduce
from itertools import permutations
from operator import add
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks

megatron = pytest.importorskip("onpolicy.train.megatron.optimizer")

GRADIENTS = [torch.tensor([x, -0.0] * 5) for x in (1.0, 1e8, -1e8, 0.1, 0.3)]
"""Of five micro-batches: any other order has another sum."""


@pytest.fixture(params=[4, 1 << 24])
def block(request, monkeypatch):
    monkeypatch.setattr(megatron, "_BLOCK", request.param)
    monkeypatch.setattr(megatron, "finalize_model_grads", lambda *args: None)


def buffers_of_three_ranks():
    """What every rank leaves in its buffer to Megatron's own sum over ranks."""

    def run(rank):
        held = torch.zeros(len(GRADIENTS[0]))
        buffer = SimpleNamespace(grad_data=held, data_parallel_group=dist.group.WORLD)
        config = SimpleNamespace()
        model = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], config=config)
        ordered = megatron.OrderedGradients(model)
        for _ in range(2):  # optimizer steps
            held.zero_()
            ordered.start()
            held += GRADIENTS[rank]
            ordered.take()
            held += GRADIENTS[3 + rank] if 3 + rank < len(GRADIENTS) else 0.0
            config.finalize_model_grads_func([model])
        return held

    return on_ranks(3, run)


def test_any_sum_of_what_ranks_leave_is_that_of_one_rank(block):
    expected = reduce(add, GRADIENTS)
    for order in permutations(buffers_of_three_ranks()):
        assert torch.equal(reduce(add, order), expected)


def test_ranks_that_sum_their_own_first_have_another_sum():
    """So the test above would notice."""
    own = [reduce(add, GRADIENTS[rank::3]) for rank in range(3)]
    assert not torch.equal(reduce(add, own), reduce(add, GRADIENTS))
