"""Terms of the loss beside the objective: peers' numbers and formulas."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.training.loss import LossSettings, policy_loss
from tests.support.onpolicy_batches import (
    make_batch,
    make_micro_batches,
)
from tests.support.samples import make_train_sample


def test_a_tokens_weight_multiplies_its_objective_and_nothing_beside_it():
    settings = LossSettings(objective=ObjectiveConfig(kind="reinforce"), entropy_coef=0.5)
    entropy, weights = torch.tensor([0.3, 0.2, 0.1]), torch.tensor([0.0, 1.0, 2.5])
    log_probs, batch = make_batch([0.5, 2.0, 3.0], [1.0, -1.0, 0.5])
    _, plain = policy_loss(log_probs, batch, settings, entropy)
    weighed = replace(batch, token_weights={"objective": weights})
    loss, found = policy_loss(log_probs, weighed, settings, entropy)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    by_token = weights * batch.shares * -batch.advantages
    assert torch.equal(gradient, by_token)
    expected = (by_token * log_probs).sum().item()
    assert found["train/pg_loss"].item() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(found["train/entropy"], plain["train/entropy"])
    assert not torch.equal(found["train/pg_loss"], plain["train/pg_loss"])


def test_weights_are_packed_with_their_samples_and_are_1_of_those_without():
    samples = [make_train_sample(range(1 + n), 1, [0.0] * n, 0.0, i) for i, n in enumerate((2, 1))]
    samples[0].token_weights = {"objective": [0.0, 3.0]}
    samples[1].token_weights = {"kl_loss": [0.5]}
    (batch,) = make_micro_batches(samples, max_tokens=99)
    said = {"objective": {0: [0.0, 3.0], 1: [1.0]}, "kl_loss": {0: [1.0, 1.0], 1: [0.5]}}
    assert {term: x.tolist() for term, x in batch.token_weights.items()} == {
        term: [x for n in batch.numbers for x in each[n]] for term, each in said.items()
    }
    for each in samples:
        each.token_weights = {}
    (batch,) = make_micro_batches(samples, max_tokens=99)
    assert batch.token_weights == {}


WEIGHTS = {
    "objective": [0.0, 1.0, 2.5, 0.5], "kl_loss": [1.0, 0.0, 0.5, 3.0], "opd_kl": [0.5, 2.0, 0.0, 1.0],
    "entropy": [3.0, 0.25, 1.0, 0.0],
}  # fmt: skip


def weighed_loss(weights):
    """(loss, its gradients, metrics) of all terms, of a batch whose last token was rejected."""
    settings = LossSettings(
        objective=ObjectiveConfig(kind="reinforce"), kl_loss_coef=0.3, kl_loss_type="k2",
        opd_kl_coef=0.7, entropy_coef=0.2,
    )  # fmt: skip
    log_probs, batch = make_batch(
        [0.5, 2.0, 3.0, 1.5], [1.0, -1.0, 0.5, 2.0], ref_log_probs=torch.tensor([-0.5, 0.1, 0.7, 9.0]),
        kept=torch.tensor([True, True, True, False]),
        token_weights={term: torch.tensor(each) for term, each in weights.items()},
    )  # fmt: skip
    beside = [
        torch.tensor(x, requires_grad=True) for x in ([0.3, 0.2, 0.1, 0.4], [0.2, 0.5, 0.9, 1])
    ]
    loss, metrics = policy_loss(log_probs, batch, settings, *beside)
    return loss, torch.autograd.grad(loss, (log_probs, *beside)), metrics, log_probs


def test_the_loss_is_the_sum_of_each_terms_tokens_times_their_weights_over_all_tokens():
    """Against sums by hand, in float64."""
    loss, found, *_, log_probs = weighed_loss(WEIGHTS)
    shares = torch.tensor([0.25, 0.25, 0.25, 0], dtype=torch.float64)
    doubled = {term: torch.tensor(each, dtype=torch.float64) for term, each in WEIGHTS.items()}
    x = log_probs.detach().double().requires_grad_()
    beside = [[0.3, 0.2, 0.1, 0.4], [0.2, 0.5, 0.9, 1]]
    entropy, kl = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in beside)
    advantages, reference = torch.tensor([[1.0, -1, 0.5, 2], [-0.5, 0.1, 0.7, 9]]).double()
    expected = sum(
        [
            (doubled["objective"] * shares * -advantages * x).sum(),
            0.3 * (doubled["kl_loss"] * shares * (x - reference) ** 2 / 2).sum(),
            0.7 * (doubled["opd_kl"] * shares * kl).sum(),
            -0.2 * (doubled["entropy"] * shares * entropy).sum(),
        ]
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(expected, (x, entropy, kl))
    for one, other in zip(found, gradients, strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6, abs=1e-9)


METRICS = {
    "objective": "train/pg_loss", "kl_loss": "train/kl_loss", "opd_kl": "distillation/kl_loss",
    "entropy": None,
}  # fmt: skip
"""Of each term; that of the entropy is the policy's."""


@pytest.mark.parametrize("term", WEIGHTS)
def test_weights_of_a_term_change_no_other_and_ones_change_no_bit(term):
    plain, gradients, metrics, _ = weighed_loss({})
    loss, found, changed, _ = weighed_loss({term: WEIGHTS[term]})
    differ = {name for name in metrics if not torch.equal(metrics[name], changed[name])}
    assert differ == {"train/loss", METRICS[term]} - {None} and not torch.equal(loss, plain)
    loss, found, same, _ = weighed_loss({term: [1.0] * 4})
    assert torch.equal(loss, plain) and metrics == same
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())


def packed(rows):
    return torch.tensor([x for row in rows for x in row])


def test_the_bonus_and_its_gradient_are_trls():
    case, entropy = PEERS["entropy_bonus"], packed(PEERS["inputs"]["entropy"]).requires_grad_()
    batch = make_batch([1.0] * len(entropy), [0.0] * len(entropy))
    loss, _ = policy_loss(*batch, LossSettings(entropy_coef=case["entropy_coef"]), entropy)
    (without,) = (c["loss"] for c in PEERS["objectives"] if c["name"] == "trl bnpo")
    assert loss.item() == pytest.approx(case["loss"] - without, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, entropy)
    assert gradient.tolist() == pytest.approx(
        packed(case["gradient_of_entropy"]).tolist(), abs=1e-6
    )
