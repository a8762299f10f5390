"""Micro-batches of one-token responses, for tests of the loss and of what prepares it."""

from dataclasses import replace

import torch

from onpolicy.train.batch import make_micro_batches, with_scores, with_weights
from tests.support.samples import make_train_sample


def make_batch(ratios, advantages, **more):
    """A micro-batch of one-token responses with equal shares, and log-probs in these ratios to old."""
    samples = [
        make_train_sample([1, 2], 1, [0.0], advantage, i) for i, advantage in enumerate(advantages)
    ]
    (batch,) = make_micro_batches(
        samples, rank=0, num_ranks=1, max_tokens=99, temperature=1.0, device=torch.device("cpu")
    )
    n = len(ratios)
    scored = with_scores(batch, torch.zeros(n), None)
    weighed = with_weights(
        scored, torch.full((n,), 1 / n), torch.ones(n, dtype=torch.bool), torch.ones(n)
    )
    return torch.tensor(ratios).log().requires_grad_(), replace(weighed, **more)
