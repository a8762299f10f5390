"""A step in blocks, and gradients that ranks exchange, have the bits of whole ones on one rank."""

import copy
import weakref
from functools import reduce
from operator import add

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from onpolicy.config.groups import TrainerConfig
from onpolicy.ops.cpu import CpuOperators
from onpolicy.training.fsdp.fsdp_optimizer import (
    OrderedReduceScatter,
    Turn,
    clip_gradients,
    make_optimizer,
    take_step,
)
from tests.support.ranks import on_ranks

SIZES = [(3, 5), (97,), (700, 211), (64, 1024)]
OPERATORS = [CpuOperators(1), CpuOperators(3)]
CONFIG = TrainerConfig(weight_decay=0.1)


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    return [*made, nn.Parameter(torch.ones(4))]  # the last one never gets a gradient


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator).mul(9).exp() for size in SIZES]


def stepped(step, how_many=3, scale=1.0):
    """The parameters after some steps, and what the optimizer keeps of them."""
    ours = parameters()
    optimizer = make_optimizer(ours, CONFIG)
    for number in range(how_many):
        for parameter, gradient in zip(ours, gradients(number), strict=False):
            parameter.grad = gradient * scale
        step(optimizer, 1e-3 * (number + 1))
    states = [optimizer.state[p] for p in ours[:-1]]
    return [*ours, *(s[key] for s in states for key in ("step", "exp_avg", "exp_avg_sq"))]


def equal(ours, theirs):
    return all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("operators", OPERATORS, ids=["one thread", "three"])
def test_a_step_in_blocks_has_the_bits_of_a_whole_one(operators):
    def whole_step(optimizer, rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    whole = stepped(whole_step)
    assert equal(stepped(lambda optimizer, rate: take_step(optimizer, operators, rate)), whole)
    assert not equal(stepped(whole_step, scale=1.5), whole)


@given(st.floats(0.1, 50), st.sampled_from(OPERATORS))
def test_gradients_are_clipped_as_pytorch_clips_them(limit, operators):
    ours = gradients(0)
    norm = float(torch.stack([x.norm() for x in ours]).norm())
    theirs = [nn.Parameter(x.clone()) for x in ours]
    for parameter, gradient in zip(theirs, copy.deepcopy(ours), strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grads_with_norm_(theirs, limit, torch.tensor(norm / 10))
    clip_gradients(ours, limit, norm / 10, operators)
    assert equal(ours, [p.grad for p in theirs])


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
    monkeypatch.setattr("onpolicy.training.fsdp.fsdp_optimizer.NOTHING", 0.0)
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
