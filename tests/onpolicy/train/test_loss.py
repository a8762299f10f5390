"""The loss of a micro-batch; the objectives themselves are tested in tests/fallback_correction."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.objectives import ObjectiveConfig
from onpolicy.train.batch import make_micro_batches
from onpolicy.train.loss import LossSettings, miles_correction, policy_loss
from onpolicy.types import TrainSample

SETTINGS = LossSettings(objective=ObjectiveConfig(eps_clip=0.2, eps_clip_high=0.3))


def make_batch(ratios, advantages, **more):
    """A micro-batch of one-token responses with equal shares, and log-probs in these ratios to old."""
    samples = [
        TrainSample(
            token_ids=[1, 2], prompt_len=1, rollout_log_probs=[0.0], advantage=a, label=str(i)
        )
        for i, a in enumerate(advantages)
    ]
    (batch,) = make_micro_batches(
        samples, rank=0, num_ranks=1, max_tokens=99, temperature=1.0, device=torch.device("cpu")
    )
    n = len(ratios)
    batch.old_log_probs, batch.shares = torch.zeros(n), torch.full((n,), 1 / n)
    for name, value in more.items():
        setattr(batch, name, value)
    return torch.tensor(ratios).log().requires_grad_(), batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 1.0, -1.3, 1.0),
        (0.5, 1.0, -0.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
        (1.5, -1.0, 1.5, 0.0),
    ],
)
def test_the_clipped_objective_and_its_gradient(ratio, advantage, loss, clipped):
    log_probs, batch = make_batch([ratio], [advantage])
    got, metrics = policy_loss(log_probs, batch, SETTINGS)
    assert got.item() == pytest.approx(loss)
    assert metrics["train/pg_clipfrac"].item() == clipped
    got.backward()
    assert log_probs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_on_policy_the_gradient_is_reinforce():
    log_probs, batch = make_batch([1.0, 1.0], [2.0, -1.0])
    policy_loss(log_probs, batch, SETTINGS)[0].backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.0, 0.5])


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
    log_probs, batch = make_batch([1.0, 1.0], [1.0, 1.0])
    batch.shares = torch.tensor([1.0, 0.0])
    batch.old_log_probs = torch.tensor([0.0, value])
    loss, _ = policy_loss(log_probs, batch, SETTINGS)
    assert loss.item() == -1.0


def test_the_kl_penalty_is_added_with_its_coefficient():
    settings = LossSettings(kl_loss_coef=0.1, kl_loss_type="k3")
    case = make_batch([1.0], [1.0], ref_log_probs=torch.tensor([-0.5]))
    loss, metrics = policy_loss(*case, settings)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert metrics["train/kl_loss"].item() == pytest.approx(k3)
    assert loss.item() == pytest.approx(-1 + 0.1 * k3)


def test_the_unbiased_kl_is_weighted_by_the_ratio():
    case = make_batch([2.0], [0.0], ref_log_probs=torch.tensor([0.0]))
    for unbiased, factor in ((False, 1.0), (True, 2.0)):
        settings = LossSettings(kl_loss_coef=1.0, kl_loss_type="k1", use_unbiased_kl=unbiased)
        loss, _ = policy_loss(*case, settings)
        assert loss.item() == pytest.approx(factor * math.log(2))


def test_sequences_that_drifted_are_masked_if_their_advantage_is_negative():
    settings = LossSettings(opsm_delta=0.1)
    _, metrics = policy_loss(*make_batch([0.5, 0.5, 1.0], [-1.0, 1.0, -1.0]), settings)
    assert metrics["train/opsm_fraction"].item() == pytest.approx(1 / 3)
    assert metrics["train/pg_loss"].item() == pytest.approx((-0.5 + 1.0) / 3)


def test_a_correction_of_the_users_own_gets_what_miles_gives_it():
    def correction(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
                   total_lengths, response_lengths, **_):  # fmt: skip
        assert args == "args"
        assert [len(x) for x in train_log_probs] == response_lengths == [1, 1]
        assert total_lengths == [2, 2]
        masks = [loss_masks[0], loss_masks[1] * 0]
        return pg_loss * 3, masks, {"name": torch.tensor([1.0, 5.0])}

    settings = LossSettings(custom=miles_correction(correction, "args"))
    _, metrics = policy_loss(*make_batch([1.0, 1.0], [1.0, 1.0]), settings)
    assert metrics["train/pg_loss"].item() == -1.5
    assert metrics["tis/name"].item() == 3.0


@given(st.integers(2, 12), st.data())
def test_the_loss_of_a_batch_is_the_sum_over_its_parts(n, data):
    generator = torch.Generator().manual_seed(n)
    ratios = (torch.randn(n, generator=generator) / 3).exp().tolist()
    advantages = torch.randn(n, generator=generator).tolist()
    whole, metrics = policy_loss(*make_batch(ratios, advantages), SETTINGS)
    cut = data.draw(st.integers(1, n - 1))
    parts = []
    for part in (slice(cut), slice(cut, None)):
        log_probs, batch = make_batch(ratios[part], advantages[part])
        batch.shares = torch.full_like(batch.shares, 1 / n)
        parts.append(policy_loss(log_probs, batch, SETTINGS))
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), abs=1e-5)
    for name, value in metrics.items():
        assert sum(m[name] for _, m in parts).item() == pytest.approx(value.item(), abs=1e-5)
