"""The loss of a micro-batch; the objectives themselves are tested in tests/fallback_correction."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.config import TrainConfig, groups
from onpolicy.training.loss import LossSettings, policy_loss
from tests.support.onpolicy_batches import make_batch

SETTINGS = LossSettings(objective=ObjectiveConfig(eps_clip=0.2, eps_clip_high=0.3))


def test_importance_weights_multiply_the_policy_term_of_each_token_and_not_the_kl():
    ref = torch.tensor([-0.5, -0.5])
    weights = torch.tensor([0.0, 2.0])
    plain = make_batch([1.1, 0.9], [1.0, 1.0], ref_log_probs=ref)
    weighted = make_batch([1.1, 0.9], [1.0, 1.0], ref_log_probs=ref, importance_weights=weights)
    (_, without), (_, metrics) = (policy_loss(*case, SETTINGS) for case in (plain, weighted))
    assert without["train/pg_loss"].item() == pytest.approx(-1.0)
    assert metrics["train/pg_loss"].item() == pytest.approx(-0.9)
    assert metrics["train/kl_loss"] == without["train/kl_loss"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_token_without_a_share_adds_nothing_whatever_its_values(value):
    log_probs, batch = make_batch(
        [1.0, 1.0], [1.0, 1.0], shares=torch.tensor([1.0, 0.0]),
        old_log_probs=torch.tensor([0.0, value]),
    )  # fmt: skip
    loss, _ = policy_loss(log_probs, batch, SETTINGS)
    assert loss.item() == -1.0


def test_the_entropy_of_kept_tokens_is_taken_off_with_its_coefficient():
    log_probs, batch = make_batch([1.0, 1.0], [0.0, 0.0], kept=torch.tensor([True, False]))
    entropy = torch.tensor([0.5, 2.0], requires_grad=True)
    loss, metrics = policy_loss(log_probs, batch, LossSettings(entropy_coef=0.1), entropy)
    assert loss.item() == pytest.approx(-0.1 * 0.25) and metrics["train/entropy"] == 1.25
    loss.backward()
    assert entropy.grad.tolist() == pytest.approx([-0.05, 0])
    loss, metrics = policy_loss(log_probs, batch, LossSettings(), entropy)
    assert metrics["train/entropy"] == 1.25 and not metrics["train/entropy"].requires_grad
    assert torch.autograd.grad(loss, entropy, allow_unused=True) == (None,)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_reference_at_a_masked_token_may_be_anything(kind, junk):
    log_probs, batch = make_batch(
        [1.5, 1.0], [1.0, 1.0], ref_log_probs=torch.tensor([-0.5, junk]),
        mask=torch.tensor([True, False]),
    )  # fmt: skip
    settings = LossSettings(kl_loss_coef=1.0, kl_loss_type=kind)
    loss, _ = policy_loss(log_probs, batch, settings)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all() and log_probs.grad[1] == 0


def test_a_token_of_gspo_weighs_by_its_sequence_unless_asked_otherwise():
    def config(**algorithm):
        return TrainConfig(algorithm=groups.AlgorithmConfig(**algorithm)).loss_aggregation

    assert config(policy_loss="gspo") == "seq-mean-token-mean"
    assert config(policy_loss="ppo") == "token-mean"
    assert config(policy_loss="gspo", loss_aggregation="token-mean") == "token-mean"


@given(st.integers(2, 12), st.data())
def test_the_loss_of_a_batch_is_the_sum_over_its_parts(n, data):
    generator = torch.Generator().manual_seed(n)
    ratios = (torch.randn(n, generator=generator) / 3).exp().tolist()
    advantages = torch.randn(n, generator=generator).tolist()
    whole, metrics = policy_loss(*make_batch(ratios, advantages), SETTINGS)
    cut = data.draw(st.integers(1, n - 1))
    parts = []
    for part in (slice(cut), slice(cut, None)):
        shares = torch.full((len(ratios[part]),), 1 / n)
        parts.append(
            policy_loss(*make_batch(ratios[part], advantages[part], shares=shares), SETTINGS)
        )
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-5)
    for name, value in metrics.items():
        assert sum(m[name] for _, m in parts).item() == pytest.approx(value.item(), abs=1e-5)
