"""Micro-batches of one-token responses, for tests of the loss and of what prepares it."""

from dataclasses import replace

import torch

from onpolicy.training.batch import packed_batch
from onpolicy.training.shares import make_shares
from tests.support.samples import make_train_sample


def make_micro_batches(samples, *, max_tokens, rank=0, num_ranks=1):
    """A rank's micro-batches of an optimizer step on these samples."""
    share = make_shares(samples, 1, num_ranks, max_tokens)[rank]
    return [packed_batch(part, torch.device("cpu")) for part in share[0]]


def scored_batch(batch, old, reference=None):
    """Where each token has the reward of its sample for an advantage."""
    trained = [(s.reward, s.trajectory.num_sampled) for s in batch.samples]
    advantages = torch.cat([torch.full((length,), reward) for reward, length in trained])
    return replace(batch, advantages=advantages, old_log_probs=old, ref_log_probs=reference)


def weighed_batch(scored, kept):
    """With equal shares, and no weights."""
    n = len(kept)
    shares = torch.full((n,), 1 / n)
    return replace(scored, shares=shares, kept=kept, importance_weights=torch.ones(n))


def make_batch(ratios, advantages, **more):
    """A micro-batch of one-token responses with equal shares, and log-probs in these ratios to old."""
    samples = [
        make_train_sample([1, 2], 1, [0.0], advantage, i) for i, advantage in enumerate(advantages)
    ]
    (batch,) = make_micro_batches(samples, max_tokens=99)
    n = len(ratios)
    scored = scored_batch(batch, torch.zeros(n))
    weighed = weighed_batch(scored, torch.ones(n, dtype=torch.bool))
    return torch.tensor(ratios).log().requires_grad_(), replace(weighed, **more)
