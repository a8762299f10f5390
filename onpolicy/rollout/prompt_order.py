"""Order in which a run visits its prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onpolicy.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the prompts, from one source."""

    size: int
    """The number of prompts."""

    weight: float
    """The share of visits, in proportion to the weights of the other parts."""


def joined(
    sources: Sequence[Sequence[Prompt]], weights: Sequence[float]
) -> tuple[list[Prompt], list[Part]]:
    """Return the prompts of several sources as one list, and its parts with these weights.

    Without weights there are no parts, and the list is visited as the prompts of a single file are.
    """
    prompts = [prompt for source in sources for prompt in source]
    numbered = [replace(prompt, index=i) for i, prompt in enumerate(prompts)]
    parts = [Part(size=len(s), weight=w) for s, w in zip(sources, weights, strict=False)]
    return numbered, parts


class PromptSource:
    """An endless, seeded sequence of prompts; position k depends on (seed, k) alone.

    All `prompts` are visited in every epoch. With `parts`, consecutive ranges of the list, each
    part has epochs of its own, and the next prompt comes from the part that is furthest behind its
    share: after any number of prompts each part is within one prompt of it, or a few with many
    parts.
    """

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool, parts: Sequence[Part] = ()):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self._parts = [*parts] or [Part(size=len(prompts), weight=1.0)]
        self._visits = [0] * len(self._parts)
        self._turns: list[tuple[int, int]] = []
        """(part, number of earlier visits to it) of each position so far."""
        self._orders: dict[int, tuple[int, list[int]]] = {}
        """(epoch, order of its prompts) of each part."""

    def at(self, position: int) -> Prompt:
        """Return the prompt at `position`, counted from 0."""
        part, visit = self._turn(position) if len(self._parts) > 1 else (0, position)
        epoch, offset = divmod(visit, self._parts[part].size)
        first = sum(before.size for before in self._parts[:part])
        return self.prompts[first + self._order(part, epoch)[offset]]

    def _turn(self, position: int) -> tuple[int, int]:
        while len(self._turns) <= position:
            due = [(n + 1) / p.weight for n, p in zip(self._visits, self._parts, strict=True)]
            # The part whose next visit is due first, at equal spacing by weight.
            part = due.index(min(due))
            self._turns.append((part, self._visits[part]))
            self._visits[part] += 1
        return self._turns[position]

    def _order(self, part: int, epoch: int) -> list[int]:
        known = self._orders.get(part)
        if known is None or known[0] != epoch:
            order = list(range(self._parts[part].size))
            if self.shuffle:
                key = f"{self.seed}/{epoch}" + (f"/{part}" if part else "")
                random.Random(key).shuffle(order)
            self._orders[part] = known = epoch, order
        return known[1]
