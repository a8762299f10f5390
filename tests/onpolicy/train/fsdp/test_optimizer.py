"""A step in blocks is PyTorch's own step, bit by bit, on any number of threads."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onpolicy.config.groups import TrainerConfig
from onpolicy.ops.cpu import CpuOperators
from onpolicy.train.fsdp.optimizer import clip_gradients, make_optimizer, take_step

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
