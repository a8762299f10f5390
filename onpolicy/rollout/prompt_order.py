"""Order in which a run visits its prompts, and the curriculum that skips some of them.

Whether a prompt is skipped depends on the pass rates that the run itself has measured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from onpolicy.config.groups import DataConfig
from onpolicy.system.records import Count
from onpolicy.types import Prompt, SampleGroup


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
    """Return the prompts of several sources as one list, and its parts: none without weights."""
    prompts = [prompt for source in sources for prompt in source]
    numbered = [replace(prompt, index=i) for i, prompt in enumerate(prompts)]
    parts = [Part(size=len(s), weight=w) for s, w in zip(sources, weights, strict=False)]
    return numbered, parts


VISITS: dict[str, Callable[[float], float]] = {
    "failures": lambda rate: 1 - rate,
    "learnability": lambda rate: 4 * rate * (1 - rate),
}
"""Probability of a visit by the pass rate: Kimi k1.5, arXiv 2501.12599, section 2.3.4; 4 times the
variance of a pass, arXiv 2502.12272."""

SMALLEST_CHANCE = 0.05
"""The smallest probability of a visit, so that no prompt is left out for good."""


class Curriculum:
    """The prompts of a source in its order, less those that are skipped.

    Choices depend on counts of rollouts and on no clock: the prompts of a rollout that is sampled
    under weight version v depend on the rollouts before v, which those weights have learnt from.
    Whether a prompt is skipped depends on these, on the seed, and on its position in the source.
    """

    def __init__(self, source: PromptSource, config: DataConfig):
        self._source, self._config = source, config
        self._visits = VISITS.get(config.curriculum)
        self.state = CurriculumState()

    def begin(self, step: int, version: int) -> None:
        """Choose the prompts of rollout `step`, sampled under `version`, from now on."""
        known = self.state
        known.step = step
        # Count the pass rates of the rollouts that these weights have learnt from.
        while known.measured and known.measured[0][0] < version:
            _, prompt, rate = known.measured.pop(0)
            known.rates[prompt] = rate

    def at(self, number: int) -> Prompt:
        """Return the prompt of a group; the same number always gives the same prompt."""
        if self._visits is None:
            return self._source.at(number)
        if number not in self.state.chosen:
            self.state.chosen[number] = self._choose(number).index
        return self._source.prompts[self.state.chosen[number]]

    def _choose(self, number: int) -> Prompt:
        assert self._visits is not None
        known = self.state
        known.position = max(known.position, number)
        while True:
            prompt = self._source.at(known.position)
            chance = random.Random(f"{self._source.seed}/visit/{known.position}").random()
            known.position += 1
            rate = known.rates.get(prompt.index)
            visits = 1.0 if rate is None else self._visits(rate)
            if chance < max(visits, SMALLEST_CHANCE):
                return prompt

    def measure(self, groups: Iterable[SampleGroup]) -> None:
        """Record the share of responses that passed in each group, including groups not trained on."""
        if self._visits is None:
            return
        least = self._config.curriculum_pass_reward
        for group in groups:
            if rewards := group.rewards:
                rate = fmean(reward >= least for reward in rewards)
                self.state.measured.append((self.state.step, group.prompt.index, rate))

    def resume(self, state: CurriculumState) -> None:
        """Continue from `state`. Raises ValueError for a state of other prompts."""
        if any(prompt >= len(self._source.prompts) for prompt in state.chosen.values()):
            raise ValueError(f"curriculum.chosen: there are {len(self._source.prompts)} prompts")
        self.state = state


@dataclass(slots=True, kw_only=True)
class CurriculumState:
    """Everything that later choices depend on, besides settings and prompts."""

    step: Count = 0
    position: Count = 0

    chosen: dict[Count, Count] = field(default_factory=dict)
    """The indices of prompts by the numbers of their groups."""

    rates: dict[Count, float] = field(default_factory=dict)
    """The latest pass rate of each visited prompt."""

    measured: list[tuple[Count, Count, float]] = field(default_factory=list)
    """(rollout, prompt, pass rate) of rollouts that choices may not depend on yet."""
