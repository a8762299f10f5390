"""The order in which a run visits its prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onpolicy.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Prompts that come from one place, beside those of others."""

    size: int
    """How many there are."""

    weight: float
    """Its share of what is visited, in proportion to the others' weights."""


def joined(
    sources: Sequence[Sequence[Prompt]], weights: Sequence[float]
) -> tuple[list[Prompt], list[Part]]:
    """The prompts of several places as one list, and the parts of it that have these weights.

    Without weights they are one part, which is visited as the prompts of a single file are.
    """
    prompts = [prompt for source in sources for prompt in source]
    numbered = [replace(prompt, index=i) for i, prompt in enumerate(prompts)]
    parts = [Part(size=len(s), weight=w) for s, w in zip(sources, weights, strict=False)]
    return numbered, parts


class PromptSource:
    """An endless, seeded sequence of prompts; position k depends on (seed, k) alone.

    `prompts` are visited whole in every epoch. With `parts`, into which they fall in their order, each
    part has epochs of its own, and the next prompt is one of the part that is furthest behind its share:
    after any number of prompts each part is within one prompt of it, or a few with many parts.
    """

    def __init__(self, prompts: list[Prompt], seed: int, shuffle: bool, parts: Sequence[Part] = ()):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self._parts = [*parts] or [Part(size=len(prompts), weight=1.0)]
        self._visits = [0] * len(self._parts)
        self._turns: list[tuple[int, int]] = []
        """(its part, how many came from that before) of each position so far."""
        self._orders: dict[int, tuple[int, list[int]]] = {}
        """(an epoch, its order) of each part."""

    def at(self, position: int) -> Prompt:
        """The prompt that comes after `position` others."""
        part, visit = self._turn(position) if len(self._parts) > 1 else (0, position)
        epoch, offset = divmod(visit, self._parts[part].size)
        first = sum(before.size for before in self._parts[:part])
        return self.prompts[first + self._order(part, epoch)[offset]]

    def _turn(self, position: int) -> tuple[int, int]:
        while len(self._turns) <= position:
            due = [(n + 1) / p.weight for n, p in zip(self._visits, self._parts, strict=True)]
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
