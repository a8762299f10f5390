"""Trajectories of several turns: what was given between sampled tokens is read, and not learnt."""

import dataclasses
import random

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.models.policy import PackedTokens
from tests.onpolicy.train.fsdp.test_trainer import RATES, make, make_samples, with_log_prob
from tests.support.samples import with_trajectory

__all__ = ["make"]


def in_turns(sample, rng):
    """The sample as if some of its response had been given; every other token has its own advantage."""
    trajectory = sample.sample.trajectory
    start = len(trajectory.prompt_ids)
    kept = [True, *(rng.random() < 0.6 for _ in trajectory.rollout_log_probs[1:])]
    changed = with_trajectory(
        sample,
        sampled=[*trajectory.sampled[:start], *kept],
        rollout_log_probs=[
            x for x, keep in zip(trajectory.rollout_log_probs, kept, strict=True) if keep
        ],
    )
    return dataclasses.replace(changed, advantages=[rng.uniform(-1, 1) for _ in range(sum(kept))])


def samples_in_turns(trainer):
    rng = random.Random(1)
    return [in_turns(sample, rng) for sample in make_samples(trainer)]


def test_every_sampled_token_is_compared_and_no_other(make):
    trainer = make()
    samples = samples_in_turns(trainer)
    metrics = trainer.train(samples, 0, RATES).metrics
    assert metrics["parity/num_compared_tokens"] == sum(len(s.advantages) for s in samples)
    assert metrics["parity/num_mismatched_tokens"] == metrics["parity/max_ulp"] == 0


def test_one_bit_after_a_given_token_is_found_at_its_place(make):
    trainer = make()
    samples = samples_in_turns(trainer)
    last = len(samples[3].advantages) - 1
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
    trainer = make()
    samples = samples_in_turns(trainer)
    advantages = torch.tensor([x for s in samples for x in s.advantages])
    trajectories = [s.sample.trajectory for s in samples]
    packed = PackedTokens.pack(
        [t.token_ids for t in trajectories], [t.sampled for t in trajectories], [1.0] * len(samples)
    )
    log_probs, _ = trainer.policy.module(packed)
    (-(advantages * log_probs).mean()).backward()
    gradients = [
        p.grad.to_local() for p in trainer.policy.module.parameters() if p.grad is not None
    ]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    trainer.policy.module.zero_grad()
    metrics = (
        make(fallback={}, algorithm={"loss_aggregation": "token-mean"})
        .train(samples, 0, RATES)
        .metrics
    )
    assert metrics["train/loss"] == pytest.approx(-advantages.mean().item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
