"""The exchange of gradients, rank by rank; whole trainers are in ../test_rank_invariance.py."""

import weakref
from functools import reduce
from operator import add

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from onpolicy.train.fsdp.gradients import OrderedReduceScatter, Turn
from tests.support.ranks import on_ranks

SHARD = 2
GRADIENTS = [torch.tensor([x, x, -0.0, -0.0, 1e-8, x]) for x in (1.0, 1e8, -1e8, 0.1, 0.3)]
"""Of five micro-batches: any other order has other sums, and an element is always -0.0."""


def bits(x):
    return x.view(torch.int32).tolist()


def in_one_order():
    return bits(reduce(add, GRADIENTS))


def on_three_ranks(make):
    """The bits of the whole gradient that three ranks have found in two rounds.

    As FSDP2 does: the first output becomes the gradient, and the second is added to it.
    """

    def run(rank):
        turn = Turn()
        reduce_scatter = make(turn)
        for number in range(2):
            turn.is_filler = 3 * number + rank >= len(GRADIENTS)
            filler = torch.zeros(3 * SHARD)
            ours = filler if turn.is_filler else GRADIENTS[3 * number + rank].clone()
            output = torch.empty(SHARD)
            reduce_scatter(output, ours, dist.group.WORLD, dist.ReduceOp.SUM)
            if number == 0:
                shard = output
            else:
                shard += output
        return shard

    return bits(torch.cat(on_ranks(3, run)))


def test_the_sum_is_that_of_one_rank_down_to_the_sign_of_zeros():
    assert on_three_ranks(OrderedReduceScatter) == in_one_order()


def test_a_sum_of_each_round_by_itself_is_another():
    """So the test above would notice."""
    assert on_three_ranks(lambda turn: DefaultReduceScatter()) != in_one_order()


def test_the_zeros_of_a_filler_would_change_a_sign(monkeypatch):
    monkeypatch.setattr("onpolicy.train.fsdp.gradients.NOTHING", 0.0)
    assert on_three_ranks(OrderedReduceScatter) != in_one_order()


def test_other_parameters_than_in_the_first_micro_batch_are_no_sum(monkeypatch):
    def run(rank):
        turn = Turn()
        reduce_scatter = OrderedReduceScatter(turn)
        for size in (4, 6):
            reduce_scatter(torch.empty(size // 2), torch.ones(size), dist.group.WORLD, None)

    assert all(isinstance(error, RuntimeError) for error in on_ranks(2, run))


def test_a_step_leaves_no_memory_of_its_sums_and_the_next_one_starts_anew():
    def run(rank):
        turn, found = Turn(), []
        reduce_scatter = OrderedReduceScatter(turn)
        for _ in range(2):
            output = torch.empty(SHARD)
            reduce_scatter(output, torch.ones(2 * SHARD), dist.group.WORLD, dist.ReduceOp.SUM)
            found += output.tolist()
            memory = weakref.ref(output)
            turn.sums.clear()
            del output
            found.append(memory() is None)
        return found

    assert on_ranks(2, run) == [[2.0, 2.0, True] * 2] * 2
