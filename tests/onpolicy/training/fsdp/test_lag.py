"""Samples of earlier weights in the FSDP2 engine."""

import dataclasses
import math

import pytest
import torch

from onpolicy.trajectory import Span
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, make_samples, weights
from tests.support.samples import with_trajectory

__all__ = ["make"]

LAG = {"rollout_lag": 1}
WEIGHED = {"use_tis": True}


def of_version(trained, *versions, learns=5):
    """The sample as if its tokens, in as many stretches, came from these versions."""
    length = len(trained.response_ids)
    ends = [length * (i + 1) // len(versions) for i in range(len(versions))]
    spans = tuple(
        Span(version=version, start=start, end=end)
        for version, start, end in zip(versions, [0, *ends[:-1]], ends, strict=True)
    )
    return dataclasses.replace(with_trajectory(trained, spans=spans), policy_version=learns)


def test_fresh_samples_train_to_the_same_bits_whether_they_might_have_lagged_or_not(make):
    plain, lagged = make(), make(rollout=LAG, fallback=WEIGHED)
    samples = make_samples(plain)
    expected = plain.train(samples, 5, RATES).metrics
    found = lagged.train([of_version(s, 5) for s in samples], 5, RATES).metrics
    assert found["train/loss"] == expected["train/loss"]
    assert found["parity/num_compared_tokens"] == expected["parity/num_compared_tokens"]
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(lagged)[name])


def stale(make, **changes):
    """A trainer that has gone on by two steps, and what it sampled before and after the first."""
    trainer = make(rollout=LAG, **changes)
    old = [of_version(s, 3) for s in make_samples(trainer)]
    trainer.train([of_version(s, 3, learns=3) for s in old], 3, RATES)
    trainer.train([of_version(s, 4, learns=4) for s in make_samples(trainer, seed=1)], 4, RATES)
    return trainer, old


def test_stale_tokens_are_weighed_by_how_far_the_policy_went_and_are_not_compared(make):
    trainer, old = stale(make, fallback=WEIGHED)
    sampled = [*old]
    now = trainer.log_probs(
        [s.token_ids for s in sampled], [len(s.prompt.prompt_ids) for s in sampled], 1.0
    )
    before = torch.cat([torch.tensor(s.rollout_log_probs) for s in sampled])
    ratios = (torch.cat(now) - before).exp()
    metrics = trainer.train(old, 5, RATES).metrics
    assert metrics["parity/num_compared_tokens"] == 0 and "train/k3_kl" not in metrics
    assert metrics["lag/mean"] == 2 and metrics["lag/2/share"] == 1
    assert metrics["lag/2/k3"] > 0 and metrics["train/ppo_kl"] == 0  # the ratio is to pi_old
    mean = ratios.clamp(max=2.0).double().mean().item()
    assert metrics["correction/weight_mean"] == pytest.approx(mean, rel=1e-6) != 1


def test_one_step_on_stale_tokens_needs_no_pass_that_scores_them(make, monkeypatch):
    """With one and without it every weight and every metric has the same bits."""
    (scored, old), (plain, same) = (stale(make, fallback=WEIGHED) for _ in range(2))
    monkeypatch.setattr(scored.learner.corrections, "needs_scores", lambda num_steps: True)
    monkeypatch.setattr(plain.policy, "score", None)
    expected, found = (
        {
            k: v
            for k, v in trainer.train(samples, 5, RATES).metrics.items()
            if not k.startswith("perf/")
        }
        for trainer, samples in ((scored, old), (plain, same))
    )
    assert found == expected and found["correction/weight_mean"] != 1
    for name, tensor in weights(scored).items():
        assert torch.equal(tensor, weights(plain)[name])


def test_without_a_correction_stale_tokens_are_learnt_from_as_they_are(make):
    trainer, old = stale(make, fallback={"correct_lag": False})
    weighed, same = stale(make, fallback=WEIGHED)
    metrics = trainer.train(old, 5, RATES).metrics
    assert metrics["lag/2/k3"] > 0 and metrics["train/ppo_kl"] == 0
    assert "correction/weight_mean" not in metrics
    weighed.train(same, 5, RATES)
    pairs = zip(weights(trainer).values(), weights(weighed).values(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_in_bypass_the_ratio_is_to_the_policy_that_sampled(make):
    trainer, old = stale(make, fallback={"use_rollout_logprobs": True})
    metrics = trainer.train(old, 5, RATES).metrics
    assert metrics["train/ppo_kl"] != 0 and metrics["lag/2/k3"] > 0
    assert "correction/weight_mean" not in metrics


def test_of_a_response_of_two_versions_the_fresh_stretch_is_compared(make):
    trainer = make(rollout=LAG, fallback=WEIGHED)
    samples = [of_version(s, 3, 5) for s in make_samples(trainer)]
    fresh = sum(lag == 0 for s in samples for lag in s.lags)
    metrics = trainer.train(samples, 5, RATES).metrics
    assert metrics["parity/num_compared_tokens"] == fresh > 0
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert math.isclose(metrics["lag/0/share"] + metrics["lag/2/share"], 1)
