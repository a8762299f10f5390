import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.train.loss import LossInputs, LossSettings, kl_penalty, policy_loss, token_weights

SETTINGS = LossSettings(eps_clip=0.2, eps_clip_high=0.3)


def inputs(ratios, advantages, **more):
    log_probs = torch.tensor(ratios).log().requires_grad_()
    n = len(ratios)
    values = {
        "log_probs": log_probs,
        "old_log_probs": torch.zeros(n),
        "advantages": torch.tensor(advantages),
        "weights": torch.full((n,), 1 / n),
        **more,
    }
    return LossInputs(**values)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.3, 1.0, -1.3, 0.0),  # at the upper bound
        (1.5, 1.0, -1.3, 1.0),
        (0.5, 1.0, -0.5, 0.0),
        (0.8, -1.0, 0.8, 0.0),  # at the lower bound
        (0.5, -1.0, 0.8, 1.0),
        (1.5, -1.0, 1.5, 0.0),
    ],
)
def test_the_clipped_objective_exactly(ratio, advantage, loss, clipped):
    batch = inputs([ratio], [advantage])
    got, metrics = policy_loss(batch, SETTINGS)
    assert got.item() == pytest.approx(loss)
    assert metrics["train/pg_clipfrac"].item() == clipped
    got.backward()
    expected = 0.0 if clipped else -ratio * advantage
    assert batch.log_probs.grad.item() == pytest.approx(expected)


def test_on_policy_the_gradient_is_reinforce():
    batch = inputs([1.0, 1.0], [2.0, -1.0])
    policy_loss(batch, SETTINGS)[0].backward()
    assert batch.log_probs.grad.tolist() == pytest.approx([-1.0, 0.5])


def test_importance_weights_multiply_the_policy_term_of_each_token():
    plain, weighted = inputs([1.1, 0.9], [1.0, 1.0]), None
    weighted = inputs([1.1, 0.9], [1.0, 1.0], importance_weights=torch.tensor([0.0, 2.0]))
    assert policy_loss(weighted, SETTINGS)[0].item() == pytest.approx(-0.9)
    assert policy_loss(plain, SETTINGS)[0].item() == pytest.approx(-1.0)


def test_the_kl_penalty_is_added_with_its_coefficient():
    ref = torch.tensor([-0.5])
    settings = LossSettings(eps_clip=0.2, eps_clip_high=0.2, kl_loss_coef=0.1, kl_loss_type="k3")
    loss, metrics = policy_loss(inputs([1.0], [1.0], ref_log_probs=ref), settings)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert metrics["train/kl_loss"].item() == pytest.approx(k3)
    assert loss.item() == pytest.approx(-1 + 0.1 * k3)


def test_kl_estimators_exactly():
    log_probs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_penalty(log_probs, ref, "k1").item() == 0.5
    assert kl_penalty(log_probs, ref, "k2").item() == 0.125
    assert kl_penalty(log_probs, ref, "k3").item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean"])
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_weights_of_all_tokens_sum_to_one(aggregation, lens):
    weights = token_weights(lens, aggregation)
    assert sum(w * n for w, n in zip(weights, lens, strict=True)) == pytest.approx(1)


def test_aggregations_weigh_tokens_or_sequences():
    assert token_weights([1, 3], "token-mean") == [0.25, 0.25]
    assert token_weights([1, 3], "seq-mean") == [0.5, pytest.approx(1 / 6)]


@given(st.integers(1, 30), st.data())
def test_the_loss_of_a_batch_is_the_sum_over_its_parts(n, data):
    generator = torch.Generator().manual_seed(n)
    tensors = {
        name: torch.randn(n, generator=generator)
        for name in ("log_probs", "old_log_probs", "advantages", "weights")
    }
    cut = data.draw(st.integers(0, n))
    whole, metrics = policy_loss(LossInputs(**tensors), SETTINGS)
    parts = [
        policy_loss(LossInputs(**{k: v[part] for k, v in tensors.items()}), SETTINGS)
        for part in (slice(cut), slice(cut, None))
    ]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-4)
    for name, value in metrics.items():
        assert sum(m[name] for _, m in parts).item() == pytest.approx(value.item(), abs=1e-4)
