"""Choice of the sampled tokens of a micro-batch that the trainer draws again.

It draws from the logits of the loss's own forward pass, with the seed of a token's request and its
position (`ops/draws.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from onpolicy.errors import ParityError
from onpolicy.ops.draws import Draws
from onpolicy.ops.uniform_numbers import uniform_numbers
from onpolicy.train.batch import PackedBatch
from onpolicy.types import Sample

Batch = TypeVar("Batch", bound=PackedBatch)


def draws_of(sample: Sample) -> Draws:
    """Return the draws of the R sampled tokens of a sample; tokens with a known seed are chosen.

    Raises ParityError for a sample whose seeds cover more or fewer tokens.
    """
    sampled = sample.trajectory.sampled
    seeds: list[int | None] = [seed for seed, count in sample.seeds for _ in range(count)]
    positions = [place - 1 for place, is_sampled in enumerate(sampled) if is_sampled]
    if seeds and len(seeds) != len(positions):
        raise ParityError(
            f"{sample.name}: seeds={len(seeds)} tokens, sampled={len(positions)}: each sampled token "
            "has the seed of its request. Report it."
        )
    return Draws.of(seeds or [None] * len(positions), positions)


def with_draws(batch: Batch, share: float, seed: int) -> Batch:
    """Return the micro-batch with a share of its tokens chosen to be redrawn.

    share: above 0, up to 1. seed: the run's seed, which selects the tokens independently of the
    micro-batch. Only tokens sampled from the current policy are chosen.
    """
    found = [draws_of(s.sample) for s in batch.samples]
    seeds, positions, known = (
        torch.cat([getattr(each, name) for each in found])
        for name in ("seeds", "positions", "chosen")
    )
    is_comparable = (batch.lags == 0).cpu() & batch.sampled.cpu()
    is_due = uniform_numbers(seeds + seed, ~positions) < share
    draws = Draws(seeds, positions, known & is_comparable & is_due)
    return replace(batch, packed=replace(batch.packed, draws=draws.on(batch.packed.rows.device)))
