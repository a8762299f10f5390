"""Objectives, advantages and penalties against the numbers that peers' own functions gave.

`tests/data/peer_losses.json` has inputs and outputs, with the peer's version and the function's path.
"""

import json
from pathlib import Path

import pytest
import torch

from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.catalogue import OBJECTIVES
from onpolicy.algorithm.estimators import group_advantages
from onpolicy.algorithm.objectives import ObjectiveConfig, token_loss, token_shares

PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())
INPUTS, REWARDS = PEERS["inputs"], PEERS["rewards"]
CASES = {case["name"]: case for case in PEERS["objectives"]}


def packed(rows):
    return torch.tensor([x for row in rows for x in row])


def of_sequences(values):
    return packed([[a] * n for a, n in zip(values, INPUTS["lengths"], strict=True)])


@pytest.mark.parametrize("name", [*CASES])
def test_an_objective_has_the_loss_and_gradient_of_its_peer(name):
    case = CASES[name]
    ours = dict(case["ours"])
    aggregation = ours.pop("aggregation")
    log_probs, old = packed(INPUTS["log_probs"]).requires_grad_(), packed(INPUTS["old"])
    batch = TokenBatch.packed(log_probs, old, INPUTS["lengths"])
    advantages = of_sequences(INPUTS["advantages"])
    found = token_loss(log_probs, old, advantages, batch, ObjectiveConfig(**ours))
    longest = max(INPUTS["lengths"])
    loss = (found.loss * token_shares(batch, aggregation, scale_length=longest)).sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert gradient.tolist() == pytest.approx(packed(case["gradient"]).tolist(), abs=1e-6)


def test_every_objective_is_compared():
    """But score centering, which is more than a loss of the sampled token: test_score_centering.py."""
    assert {case["ours"]["kind"] for case in CASES.values()} == {*OBJECTIVES} - {"centered"}


@pytest.mark.parametrize("estimator", PEERS["estimators"])
def test_an_estimator_has_the_advantages_of_its_peer(estimator):
    found = group_advantages(REWARDS["groups"], estimator, REWARDS["lengths"])
    expected = PEERS["estimators"][estimator]["advantages"]
    assert [a for group in found for a in group] == pytest.approx(expected, abs=1e-6)
