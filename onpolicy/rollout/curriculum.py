"""Which prompts a run passes over, by the pass rates that it has measured itself."""

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
    """The prompts of a source in its order, less those that are passed over.

    What decides is counted in rollouts, so that no clock does: the prompts of a rollout that is drawn
    under version v of the weights go by the rollouts before v, which those have learnt from. Whether a
    prompt is passed over depends on that, on the seed, and on its position in the source.
    """

    def __init__(self, source: PromptSource, config: DataConfig):
        self._source, self._config = source, config
        self._visits = VISITS.get(config.curriculum)
        self._step = self._position = 0
        self._chosen: dict[int, int] = {}
        """Indices of prompts, by the numbers of their groups."""

        self._rates: dict[int, deque[float]] = {}
        """The pass rates of each prompt that was visited, the latest last."""

        self._measured: deque[tuple[int, int, float]] = deque()
        """(rollout, prompt, pass rate) of rollouts that no choice may go by yet."""

    @property
    def is_on(self) -> bool:
        """Whether prompts are passed over."""
        return self._visits is not None

    def begin(self, step: int, version: int) -> None:
        """The prompts of rollout `step`, drawn under `version`, are chosen from now on."""
        self._step = step
        while self._measured and self._measured[0][0] < version:
            _, prompt, rate = self._measured.popleft()
            window = deque[float](maxlen=self._config.curriculum_window)
            self._rates.setdefault(prompt, window).append(rate)

    def at(self, number: int) -> Prompt:
        """The prompt of a group; always the same of the same number."""
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
        """Note how many responses of each group have passed, also of groups that are not trained on."""
        if self._visits is None:
            return
        least = self._config.curriculum_pass_reward
        for group in groups:
            if rewards := group.rewards:
                rate = fmean(reward >= least for reward in rewards)
                self._measured.append((self._step, group.prompt.index, rate))

    def state_dict(self) -> dict[str, Any]:
        """All that later choices depend on."""
        return {
            "step": self._step,
            "position": self._position,
            "chosen": {str(number): prompt for number, prompt in self._chosen.items()},
            "rates": {str(prompt): [*rates] for prompt, rates in self._rates.items()},
            "measured": [[*item] for item in self._measured],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises ValueError for a state that is none."""
        self._step, self._position = state["step"], state["position"]
        self._chosen = {int(number): prompt for number, prompt in state["chosen"].items()}
        if any(prompt >= len(self._source.prompts) for prompt in self._chosen.values()):
            raise ValueError(f"curriculum.chosen: there are {len(self._source.prompts)} prompts")
        window = self._config.curriculum_window
        self._rates = {int(p): deque(rates, maxlen=window) for p, rates in state["rates"].items()}
        self._measured = deque((int(s), int(p), rate) for s, p, rate in state["measured"])
