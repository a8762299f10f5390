"""A policy of two small tables: what the engines in memory sample from, and their trainer trains.

The logits of a token are a row of one table, by the token before it, plus a row of the other, by the
one before that. Every row is computed alone, so the same weights give the same bits wherever it is.
"""

import dataclasses
import random

import torch
from torch import Tensor

from onpolicy.contract import NumericsContract, OperatorShapes

VOCAB_SIZE = 12
END = 1
"""The token that ends a response."""

ALIGNED = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(linear=(), attention=(), norm=(), vocab_size=VOCAB_SIZE),
)

STOCK = dataclasses.replace(ALIGNED, backend="stock")


def make_weights(seed=0):
    """float32 [V, V] by name; those of seed 0 are the checkpoint's."""
    generator = torch.Generator().manual_seed(seed)
    names = ("before.weight", "two_before.weight")
    return {name: torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) for name in names}


def score(weights, context, temperature, *, is_rounded):
    """Log-probabilities of the token after `context`: float32 [V].

    `is_rounded`: by logits in bfloat16, as those of an engine of the stock contract are here.
    """
    logits = sum(
        table[token] for table, token in zip(weights.values(), reversed(context), strict=False)
    )
    assert isinstance(logits, Tensor)
    logits = logits.bfloat16().float() if is_rounded else logits
    return torch.log_softmax(logits / temperature, dim=-1)


def sample(log_probs, seed, position):
    """A token, by a random number that depends on seed and position alone."""
    below = random.Random(f"{seed}/{position}").random()
    cumulative = log_probs.double().exp().cumsum(0)
    return min(int((cumulative <= below).sum()), len(log_probs) - 1)


def draw_again(weights, context, temperature, seed):
    """The token after `context` that engines in memory draw by a seed, by an aligned contract."""
    return sample(score(weights, context, temperature, is_rounded=False), seed, len(context))


def log_probs_of(weights, prompt, response, temperature):
    """Log-probabilities of a response's tokens by an aligned contract: float32 [R]."""
    tokens = [*prompt, *response]
    rows = [
        score(weights, tokens[:end], temperature, is_rounded=False)[tokens[end]]
        for end in range(len(prompt), len(tokens))
    ]
    return torch.stack(rows)
