"""The token that a seed draws, for the engine's sampler and for the trainer, which draws it again.

A token depends only on its row of log-probabilities, its seed and its position. So anyone with the
same bits of all three draws the same token. A trainer that draws each sampled token again can tell
whether an engine sampled from the policy or only reported the policy's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.row_digests import NO_DIGEST, row_digests

NUMBERS = 1 << 24
"""Number of log-probabilities that are drawn from at a time: 64 MiB of float32."""

LARGEST_VOCABULARY = 1 << 24
"""Largest vocabulary whose ids float32 represents exactly; drawn tokens travel as float32."""


def draw(
    operators: Operators, log_probs: Tensor, numbers: Tensor, kept: Tensor | None = None
) -> Tensor:
    """Return one token per row: int64 [B].

    log_probs: float32 [B, V]; numbers: float64 [B], of `Operators.uniform`; kept: bool [B, V], the
    tokens that were not cut off, at least one per row; None: the whole vocabulary.
    """
    tokens = operators.sample(log_probs, numbers)
    if kept is not None:  # rounded sums may draw a token of no weight
        is_kept = kept.gather(1, tokens[:, None])[:, 0]
        tokens = torch.where(is_kept, tokens, log_probs.argmax(-1))
    return tokens


@dataclass(frozen=True, slots=True)
class Draws:
    """The seeds and positions of a micro-batch's R sampled tokens, and which of them to draw again."""

    seeds: Tensor
    """int64 [R]"""

    positions: Tensor
    """int64 [R]: position in its sequence of the token before each, as used by the engine's draw"""

    chosen: Tensor
    """bool [R], on the CPU: the tokens to draw again"""

    with_rows: bool = False
    """Whether the chosen tokens' rows of log-probabilities are digested too"""

    @staticmethod
    def of(seeds: Sequence[int | None], positions: Sequence[int], with_rows: bool = False) -> Draws:
        """Choose every token whose seed is known; both sequences have R numbers."""
        return Draws(
            seeds=torch.tensor([seed or 0 for seed in seeds], dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            chosen=torch.tensor([seed is not None for seed in seeds], dtype=torch.bool),
            with_rows=with_rows,
        )

    def on(self, device: torch.device | str) -> Draws:
        """Return the same, with the tensors that are computed with on a device."""
        return replace(self, seeds=self.seeds.to(device), positions=self.positions.to(device))

    def at(self, rows: Tensor, missing: int = 0) -> Draws:
        """Return the draws of int64 [M] tokens, and of `missing` more that are not chosen."""
        pad = (0, missing)
        seeds, positions = F.pad(self.seeds[rows], pad), F.pad(self.positions[rows], pad)
        chosen = F.pad(self.chosen[rows.cpu()], pad)
        return replace(self, seeds=seeds, positions=positions, chosen=chosen)

    def again(
        self,
        operators: Operators,
        logits: Tensor,
        temperature: Tensor,
        rows: slice,
        kept: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw the chosen tokens of these rows again: float32 [M], NaN for the others; and digest the
        rows, before any cut: int64 [M], NO_DIGEST for the others.

        logits: [M, V], with no weight on tokens that were cut off; temperature: float32 [M, 1]; kept:
        bool [M, V] as in `draw`; whole: the logits before the cut, if there is one. No autograd.
        """
        assert logits.shape[1] <= LARGEST_VOCABULARY
        found = temperature.new_full((len(logits),), torch.nan)
        digests = self.seeds.new_full((len(logits),), NO_DIGEST)
        seeds, positions = self.seeds[rows], self.positions[rows]
        step = max(1, NUMBERS // logits.shape[1])
        for places in self.chosen[rows].nonzero()[:, 0].split(step):
            at: Tensor | slice = places.to(logits.device)
            if len(places) and int(places[-1]) - int(places[0]) + 1 == len(places):
                at = slice(int(places[0]), int(places[-1]) + 1)  # a view: nothing is copied
            log_probs = operators.log_softmax(logits[at], temperature[at])
            numbers = operators.uniform(seeds[at], positions[at])
            tokens = draw(operators, log_probs, numbers, None if kept is None else kept[at])
            found[at] = tokens.float()
            if self.with_rows:
                if whole is not None:
                    log_probs = operators.log_softmax(whole[at], temperature[at])
                digests[at] = row_digests(log_probs)
        return found, digests
