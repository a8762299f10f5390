"""Trajectories of several turns: what was given between sampled tokens is read, and not learnt."""

import random
from itertools import compress

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.models.policy import PackedTokens
from onpolicy.train.advantages import Estimator
from tests.onpolicy.train.fsdp.test_trainer import RATES, make, make_samples, with_log_prob
from tests.support.samples import with_trajectory

__all__ = ["make"]


def in_turns(sample, rng):
    """The sample as if some of its response had been given."""
    trajectory = sample.sample.trajectory
    start = len(trajectory.prompt_ids)
    kept = [True, *(rng.random() < 0.6 for _ in trajectory.rollout_log_probs[1:])]
    return with_trajectory(
        sample,
        sampled=[*trajectory.sampled[:start], *kept],
        rollout_log_probs=[*compress(trajectory.rollout_log_probs, kept)],
        temperatures=[*compress(trajectory.temperatures, kept)],
    )


def samples_in_turns(trainer):
    rng = random.Random(1)
    return [in_turns(sample, rng) for sample in make_samples(trainer)]


def test_every_sampled_token_is_compared_and_no_other(make):
    trainer = make()
    samples = samples_in_turns(trainer)
    metrics = trainer.train(samples, 0, RATES).metrics
    assert metrics["parity/num_compared_tokens"] == sum(len(s.lags) for s in samples)
    assert metrics["parity/num_mismatched_tokens"] == metrics["parity/max_ulp"] == 0


def test_one_bit_after_a_given_token_is_found_at_its_place(make):
    trainer = make()
    samples = samples_in_turns(trainer)
    last = len(samples[3].lags) - 1
    assert (
        False
        in samples[3].sample.trajectory.sampled[samples[3].sample.trajectory.sampled.index(True) :]
    )
    value = torch.tensor(samples[3].sample.rollout_log_probs[last])
    off = torch.nextafter(value, torch.tensor(0.0)).item()
    samples[3] = with_log_prob(samples[3], last, off)
    with pytest.raises(ParityError, match=rf"1 of \d+ tokens.*response position={last}"):
        trainer.train(samples, 0, RATES)


def test_the_loss_is_that_of_the_sampled_tokens_each_with_its_own_advantage(make):
    """With ratios of 1: minus their mean advantage, with the gradient of their log-probabilities."""

    class OfItsOwn(Estimator):
        def advantages(self, outcomes, ours):
            return {number: given[number] for number in ours}

    trainer = make()
    samples = samples_in_turns(trainer)
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(len(s.lags), generator=generator) * 2 - 1 for s in samples]
    advantages = torch.cat(given)
    trajectories = [s.sample.trajectory for s in samples]
    packed = PackedTokens.pack(
        [t.token_ids for t in trajectories],
        [t.sampled for t in trajectories],
        [t.temperatures for t in trajectories],
    )
    log_probs, *_ = trainer.policy.module(packed)
    (-(advantages * log_probs).mean()).backward()
    gradients = [
        p.grad.to_local() for p in trainer.policy.module.parameters() if p.grad is not None
    ]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    trainer.policy.module.zero_grad()
    trainer = make(fallback={}, algorithm={"loss_aggregation": "token-mean"})
    trainer.learner.estimator = OfItsOwn()
    metrics = trainer.train(samples, 0, RATES).metrics
    assert metrics["train/loss"] == pytest.approx(-advantages.mean().item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
