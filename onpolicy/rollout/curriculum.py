"""Curriculum: skip prompts by the pass rates that the run itself has measured."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from onpolicy.config.groups import DataConfig
from onpolicy.rollout.prompt_order import PromptSource
from onpolicy.types import Prompt, SampleGroup

VISITS: dict[str, Callable[[float], float]] = {
    "failures": lambda rate: 1 - rate,
    "learnability": lambda rate: 4 * rate * (1 - rate),
}
"""Probability of a visit by the pass rate: Kimi k1.5, arXiv 2501.12599, section 2.3.4; 4 times the
variance of a pass, arXiv 2502.12272."""


class Curriculum:
    """The prompts of a source in its order, less those that are skipped.

    Choices depend on counts of rollouts and on no clock: the prompts of a rollout that is sampled
    under weight version v depend on the rollouts before v, which those weights have learnt from.
    Whether a prompt is skipped depends on these, on the seed, and on its position in the source.
    """

    def __init__(self, source: PromptSource, config: DataConfig):
        self._source, self._config = source, config
        self._visits = VISITS.get(config.curriculum)
        self._step = self._position = 0
        self._chosen: dict[int, int] = {}
        """The indices of prompts by the numbers of their groups."""

        self._rates: dict[int, deque[float]] = {}
        """The pass rates of each visited prompt, the latest last."""

        self._measured: deque[tuple[int, int, float]] = deque()
        """(rollout, prompt, pass rate) of rollouts that choices may not depend on yet."""

    @property
    def is_on(self) -> bool:
        """Whether prompts are skipped."""
        return self._visits is not None

    def begin(self, step: int, version: int) -> None:
        """Choose the prompts of rollout `step`, sampled under `version`, from now on."""
        self._step = step
        # Count the pass rates of the rollouts that these weights have learnt from.
        while self._measured and self._measured[0][0] < version:
            _, prompt, rate = self._measured.popleft()
            window = deque[float](maxlen=self._config.curriculum_window)
            self._rates.setdefault(prompt, window).append(rate)

    def at(self, number: int) -> Prompt:
        """Return the prompt of a group; the same number always gives the same prompt."""
        if self._visits is None:
            return self._source.at(number)
        if number not in self._chosen:
            self._chosen[number] = self._choose(number).index
        return self._source.prompts[self._chosen[number]]

    def _choose(self, number: int) -> Prompt:
        assert self._visits is not None
        self._position = max(self._position, number)
        while True:
            prompt = self._source.at(self._position)
            chance = random.Random(f"{self._source.seed}/visit/{self._position}").random()
            self._position += 1
            rates = self._rates.get(prompt.index)
            visits = 1.0 if rates is None else self._visits(fmean(rates))
            if chance < max(visits, self._config.curriculum_floor):
                return prompt

    def measure(self, groups: Iterable[SampleGroup]) -> None:
        """Record the share of responses that passed in each group, including groups not trained on."""
        if self._visits is None:
            return
        least = self._config.curriculum_pass_reward
        for group in groups:
            if rewards := group.rewards:
                rate = fmean(reward >= least for reward in rewards)
                self._measured.append((self._step, group.prompt.index, rate))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later choices depend on."""
        return {
            "step": self._step,
            "position": self._position,
            "chosen": {str(number): prompt for number, prompt in self._chosen.items()},
            "rates": {str(prompt): [*rates] for prompt, rates in self._rates.items()},
            "measured": [[*item] for item in self._measured],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`. Raises ValueError for an invalid state."""
        self._step, self._position = state["step"], state["position"]
        self._chosen = {int(number): prompt for number, prompt in state["chosen"].items()}
        if any(prompt >= len(self._source.prompts) for prompt in self._chosen.values()):
            raise ValueError(f"curriculum.chosen: there are {len(self._source.prompts)} prompts")
        window = self._config.curriculum_window
        self._rates = {int(p): deque(rates, maxlen=window) for p, rates in state["rates"].items()}
        self._measured = deque((int(s), int(p), rate) for s, p, rate in state["measured"])
