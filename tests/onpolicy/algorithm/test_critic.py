"""GAE and the loss of values, beside verl's and OpenRLHF's own numbers, and beside their definitions."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from onpolicy.algorithm.estimators import generalized_advantages, value_loss, whitening

PEERS = json.loads((Path(__file__).parents[2] / "data" / "gae.json").read_text())


def sampled(name):
    """Of each trajectory what its sampled tokens have, without those given in between."""
    rows = zip(PEERS[name], PEERS["mask"], strict=True)
    return [[x for x, is_sampled in zip(*row, strict=True) if is_sampled] for row in rows]


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: f"lambda {case['lambd']}")
def test_advantages_and_returns_are_verls_with_given_tokens_passed_over(case):
    rewards, values = sampled("rewards"), sampled("values")
    found = [
        generalized_advantages(r, v, case["gamma"], case["lambd"])
        for r, v in zip(rewards, values, strict=True)
    ]
    whitened = whitening([[(1, a) for a in each] for each in found])
    for advantages, own, expected, returns in zip(
        found, values, case["verl"]["whitened"], case["verl"]["returns"], strict=True
    ):
        assert [whitened(a) for a in advantages] == pytest.approx(expected, abs=1e-6)
        sums = [a + v for a, v in zip(advantages, own, strict=True)]
        assert sums == pytest.approx(returns, abs=1e-6)
    assert found[-1] == pytest.approx(case["openrlhf"]["advantages_of_the_last"], abs=1e-6)


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: f"clip {case['value_clip']}")
def test_the_loss_of_values_is_verls_and_openrlhfs(case):
    new, old = (
        torch.tensor([*chain.from_iterable(sampled(name))]) for name in ("new_values", "values")
    )
    returns = torch.tensor([*chain.from_iterable(case["verl"]["returns"])])
    each = value_loss(new, old, returns, case["value_clip"])
    assert float(each.loss.mean()) == pytest.approx(case["verl"]["value_loss"], abs=1e-6)
    assert float(each.loss.mean()) == pytest.approx(case["openrlhf"]["value_loss"], abs=1e-6)
    assert float(each.clipped.float().mean()) == pytest.approx(case["verl"]["clip_fraction"])
    assert 0 < case["verl"]["clip_fraction"] < 1


def test_the_gradient_of_the_loss_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(3)
    old, returns = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    values = (
        old + 0.4 * torch.randn(40, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    each = value_loss(values, old, returns, 0.2)
    (gradient,) = torch.autograd.grad(each.loss.sum(), values)
    ends = [value_loss(values.detach() + h, old, returns, 0.2).loss for h in (1e-6, -1e-6)]
    assert torch.allclose((ends[0] - ends[1]) / 2e-6, gradient, atol=1e-8)
    assert each.clipped.any() and gradient[each.clipped].abs().max() == 0


def test_lambda_is_between_the_critics_word_and_what_came():
    rewards, values = [0.0, 0.5, -1.0], [0.3, 0.1, 0.2]
    came = generalized_advantages(rewards, values, 1.0, 1.0)
    assert came == pytest.approx([-0.5 - 0.3, -0.5 - 0.1, -1.0 - 0.2])
    said = generalized_advantages(rewards, values, 1.0, 0.0)
    assert said == pytest.approx([0.1 - 0.3, 0.5 + 0.2 - 0.1, -1.0 - 0.2])
