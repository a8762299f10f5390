import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.tokens import TokenBatch
from onpolicy.algorithm.catalogue import OBJECTIVES
from onpolicy.algorithm.objectives import ObjectiveConfig, token_loss
from tests.support.token_batches import by_log_ratios, spread_batches

KINDS = list(OBJECTIVES)
HIGHER = {"eps_clip": 0.2, "eps_clip_high": 0.3}


def objective(log_ratios, advantages, lengths=None, mask=None, old=0.0, **config):
    """Loss, gradient by the log-probabilities, and what was clipped."""
    r = torch.tensor(log_ratios, dtype=torch.float32)
    log_probs = (r + old).requires_grad_()
    mask = None if mask is None else torch.tensor(mask)
    batch = TokenBatch.packed(r, torch.zeros_like(r), lengths or [1] * len(r), mask)
    found = token_loss(
        log_probs, torch.full_like(r, old), torch.tensor(advantages), batch,
        ObjectiveConfig(**config),
    )  # fmt: skip
    assert found.loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    return found.loss.detach(), gradient, found.clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False), (1.25, 1.0, -1.25, False), (1.5, 1.0, -1.3, True),
        (0.5, 1.0, -0.5, False), (0.5, -1.0, 0.8, True), (0.9, -1.0, 0.9, False),
        (1.5, -1.0, 1.5, False), (1.5, 0.0, 0.0, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_the_clipped_objective_exactly(kind, ratio, advantage, loss, clipped):
    got, gradient, was_clipped = objective([math.log(ratio)], [advantage], kind=kind, **HIGHER)
    assert got.item() == pytest.approx(loss)
    assert gradient.item() == pytest.approx(0.0 if clipped else -ratio * advantage)
    assert was_clipped.item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (0.5, -1.0, 0.8, True),
        (1.5, -1.0, 1.5, False),
        (2.0, -1.0, 2.0, False),  # at the cap
        (4.0, -1.0, 2.0, True),
        (4.0, 1.0, -1.3, True),  # the cap is for negative advantages
    ],
)
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_dual_clip_caps_the_loss_of_negative_advantages(kind, ratio, advantage, loss, clipped):
    r = [math.log(ratio)]
    got, gradient, was_clipped = objective(r, [advantage], kind=kind, eps_clip_c=2.0, **HIGHER)
    assert got.item() == pytest.approx(loss)
    assert gradient.item() == pytest.approx(0.0 if clipped else -ratio * advantage)
    assert was_clipped.item() == clipped


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("r", [-0.5, 0.5])
def test_a_ratio_equal_to_a_clip_bound_keeps_its_whole_gradient(advantage, r):
    ratio = torch.tensor(r).exp().item()
    bounds = {"eps_clip": 1 - ratio, "eps_clip_high": ratio - 1}
    _, gradient, clipped = objective([r], [advantage], **bounds)
    assert gradient.item() == -ratio * advantage and not clipped.item()


@pytest.mark.parametrize("c", [1.0, 0.5, math.nan])
def test_a_dual_clip_of_at_most_one_is_refused(c):
    with pytest.raises(ValueError, match=r"must be greater than 1"):
        ObjectiveConfig(eps_clip_c=c)


ratios = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8)


@given(ratios, st.integers(0, 99), st.sampled_from([None, 1.5]))
def test_gspo_is_ppo_to_the_bit_on_one_token_sequences(r, seed, c):
    advantages = torch.randn(len(r), generator=torch.Generator().manual_seed(seed)).tolist()
    ppo = objective(r, advantages, eps_clip_c=c)
    gspo = objective(r, advantages, kind="gspo", eps_clip_c=c)
    assert all(torch.equal(a, b) for a, b in zip(ppo, gspo, strict=True))


def test_gspo_has_one_ratio_per_sequence_and_spreads_its_gradient():
    loss, gradient, clipped = objective(
        [0.1, 0.0, 9.0, 0.05, 0.9], [1.0] * 5, [4, 1], [1, 1, 0, 1, 1], kind="gspo"
    )
    ratio = math.exp(0.15 / 3)
    assert loss.tolist() == pytest.approx([-ratio, -ratio, 0, -ratio, -1.2])
    assert gradient.tolist() == pytest.approx([-ratio, -ratio, 0, -ratio, 0])
    assert clipped.tolist() == [False, False, False, False, True]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    r = [math.log(x) for x in (2.0, 1.0, 0.5)]
    loss, gradient, clipped = objective(r, [1.0, -2.0, 3.0], old=-1.0, kind="cispo", **HIGHER)
    assert gradient.tolist() == pytest.approx([-1.3, 2.0, -2.4])
    factors = [r[0] - 1, r[1] - 1, r[2] - 1]
    assert loss.tolist() == pytest.approx([-1.3 * factors[0], 2 * factors[1], -2.4 * factors[2]])
    assert clipped.tolist() == [True, False, True]


def test_reinforce_is_the_log_probability_times_the_advantage():
    loss, gradient, clipped = objective([1.0, 2.0], [3.0, -1.0], old=-4.0, kind="reinforce")
    assert loss.tolist() == [9, -2]
    assert gradient.tolist() == [-3, 1]
    assert not clipped.any()


@pytest.mark.parametrize("kind", KINDS)
def test_on_policy_every_objective_has_reinforces_gradient(kind):
    _, gradient, clipped = objective([0.0, 0.0], [2.0, -1.0], old=-1.5, kind=kind)
    assert gradient.tolist() == [-2, 1] and not clipped.any()


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_the_old_policy(kind):
    log_probs = torch.zeros(2, requires_grad=True)
    old = torch.zeros(2, requires_grad=True)
    batch = by_log_ratios([[0.0, 0.0]])
    token_loss(
        log_probs, old, torch.ones(2), batch, ObjectiveConfig(kind=kind)
    ).loss.sum().backward()
    assert old.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("r", [40.0, -40.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_extreme_log_ratios_give_finite_losses_and_gradients(kind, r, advantage):
    loss, gradient, _ = objective([r, r], [advantage] * 2, [2], kind=kind)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_beyond_the_clamp_there_is_no_gradient_through_the_ratio():
    assert objective([40.0], [-1.0])[1].item() == 0
    assert objective([20.0], [-1.0])[1].item() == torch.tensor(20.0).exp().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_tokens_have_no_loss_and_no_gradient_whatever_stands_there(kind, junk):
    loss, gradient, clipped = objective(
        [0.1, junk, junk], [1.0, junk, 1.0], [2, 1], [1, 0, 0], kind=kind
    )
    plain = objective([0.1], [1.0], kind=kind)
    assert torch.equal(loss, torch.cat([plain[0], torch.zeros(2)]))
    assert torch.equal(gradient, torch.cat([plain[1], torch.zeros(2)]))
    assert not clipped[1:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_a_gradient(kind):
    loss, gradient, _ = objective([], [], kind=kind)
    assert loss.sum().item() == 0 and len(gradient) == 0


@given(spread_batches(), st.sampled_from(KINDS))
def test_the_loss_of_a_token_does_not_depend_on_other_sequences(case, kind):
    batch, parts = case
    config = ObjectiveConfig(kind=kind)

    def losses(part):
        advantages = part.rollout_log_probs + 1
        return token_loss(
            part.train_log_probs, part.rollout_log_probs, advantages, part, config
        ).loss

    whole = losses(batch)
    for part, index in parts:
        assert torch.equal(losses(part), whole[index])


def icepop(log_probs, old_log_probs, advantages, batch):
    """IcePop (arXiv 2510.18855): tokens whose ratio is outside of [0.5, 2] have no loss."""
    ratio = (log_probs - old_log_probs).exp()
    return torch.where((ratio > 0.5) & (ratio < 2), -ratio * advantages, 0)


def test_an_own_objective_has_its_loss_and_gradient_where_tokens_count():
    log_ratios, advantages = [0.1, 3.0, math.nan], [1.0, 1.0, 1.0]
    loss, gradient, clipped = objective(log_ratios, advantages, [3], [1, 1, 0], custom=icepop)
    assert loss.tolist() == gradient.tolist() == [pytest.approx(-math.exp(0.1)), 0, 0]
    assert not clipped.any()


def test_an_own_objective_that_is_no_loss_of_tokens_is_refused():
    with pytest.raises(ValueError, match=r"--custom-loss-path: shape=\(\) is the loss of 2 tokens"):
        objective([0.1, 0.2], [1.0, 1.0], custom=lambda *given: icepop(*given).sum())
