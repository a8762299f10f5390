"""Terms of the loss beside the objective: peers' numbers, formulas, and what decides over a batch."""

from dataclasses import replace

import pytest
import torch

from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.config import TrainConfig, groups
from onpolicy.train.loss import LossSettings, policy_loss
from onpolicy.train.marks import marked
from tests.support.onpolicy_batches import (
    make_batch,
    make_micro_batches,
    scored_batch,
    weighed_batch,
)
from tests.support.peer_losses import case_of, packed, peer_batch
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample


def require_peers(name, settings, log_probs, batch, value=True):
    """The loss and the gradient that the peer's function gave."""
    case = case_of(name)
    loss, _ = policy_loss(log_probs, batch, settings)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx(packed(case["gradient"]).tolist(), abs=1e-6)
    assert not value or loss.item() == pytest.approx(case["loss"], abs=1e-6)


def test_the_squared_log_ratio_is_that_of_verls_dro():
    coef = case_of("verl dro")["ours"]["log_ratio_coef"]
    reinforce = ObjectiveConfig(kind="reinforce")
    settings = LossSettings(objective=reinforce, log_ratio_coef=coef)
    require_peers("verl dro", settings, *peer_batch())


def test_a_rejected_token_has_no_squared_log_ratio_whatever_its_values():
    old, kept = torch.tensor([0.0, torch.nan]), torch.tensor([True, False])
    log_probs, batch = make_batch([2.0, 1.0], [0.0, 0.0], old_log_probs=old, kept=kept)
    loss, metrics = policy_loss(log_probs, batch, LossSettings(log_ratio_coef=3.0))
    assert metrics["train/squared_log_ratio"].item() == pytest.approx(log_probs[0].item() ** 2 / 2)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx([3 * log_probs[0].item(), 0])


ALGORITHM = groups.AlgorithmConfig(positive_nll_coef=0.5, positive_nll_above=0.1)
REWARDS, LENGTHS = (0.1, 1.0, -1.0, 0.3), (2, 3, 1, 2)


def steps(aggregation, max_tokens, num_ranks=1, algorithm=ALGORITHM):
    """The marked micro-batches of every rank, of one optimizer step."""
    config = TrainConfig(algorithm=replace(algorithm, loss_aggregation=aggregation))
    samples = [
        make_train_sample(range(1 + n), 1, [-0.5 - i / 7] * n, reward, i)
        for i, (n, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]

    def on_rank(rank):
        batches = make_micro_batches(samples, max_tokens=max_tokens, rank=rank, num_ranks=num_ranks)
        scored = [scored_batch(b, b.rollout_log_probs) for b in batches]
        return marked([weighed_batch(b, b.mask) for b in scored], config)

    return [batch for step in on_ranks(num_ranks, on_rank) for batch in step]


def by_sample(batches, values):
    """The values of each sample's tokens, by its number."""
    return {
        number: part.tolist()
        for batch in batches
        for number, part in zip(
            batch.numbers, values(batch).split(batch.response_lens), strict=False
        )
    }


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("token-mean", (0.2, 0.2)),
        ("seq-mean-token-mean", (1 / 6, 1 / 4)),
        ("seq-mean-token-sum", (0.5, 0.5)),
    ],
)
def test_samples_of_a_high_reward_are_imitated_by_a_mean_over_them_alone(aggregation, shares):
    found = by_sample(steps(aggregation, 99), lambda batch: batch.positive_shares)
    assert found[0] == [0, 0] and found[2] == [0]
    assert found[1] == pytest.approx([shares[0]] * 3) and found[3] == pytest.approx([shares[1]] * 2)
    for max_tokens, num_ranks in ((4, 1), (99, 2), (4, 3)):
        batches = steps(aggregation, max_tokens, num_ranks)
        assert by_sample(batches, lambda batch: batch.positive_shares) == found


def test_the_imitation_is_the_mean_negative_log_probability():
    (batch,) = steps("token-mean", 99)
    log_probs = torch.arange(8.0).neg().requires_grad_()
    loss, metrics = policy_loss(log_probs, batch, LossSettings(positive_nll_coef=0.5))
    assert metrics["train/positive_nll"].item() == pytest.approx((2 + 3 + 4 + 6 + 7) / 5)
    assert loss.item() - metrics["train/pg_loss"].item() == pytest.approx(0.5 * 22 / 5)
    plain, _ = policy_loss(log_probs, replace(batch, positive_shares=None), LossSettings())
    (gradient,) = torch.autograd.grad(loss - plain, log_probs)
    assert gradient.tolist() == pytest.approx([0, 0, *[-0.1] * 3, 0, *[-0.1] * 2], abs=1e-6)


def test_nothing_is_marked_without_being_asked_for():
    (batch,) = steps("token-mean", 99, algorithm=groups.AlgorithmConfig())
    assert batch.positive_shares is None
