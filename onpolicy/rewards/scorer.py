"""Scores samples in a worker process, with a time limit for each that really ends it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessPool

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ConfigError
from onpolicy.plugins import load_function
from onpolicy.rewards import load_rule
from onpolicy.types import Prompt, Sample

Scored = float | dict[str, float]


class Scorer:
    """Fills in the rewards of samples by the configured rule."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self._custom: Callable[[Sample], Any] | None = None
        self._pool: ProcessPool | None = None
        if config.custom_rm_path:
            self._custom = load_function(config.custom_rm_path, "--custom-rm-path")
            if inspect.iscoroutinefunction(self._custom):
                raise ConfigError(
                    f"--custom-rm-path={config.custom_rm_path}: is async. It is called for one "
                    "sample at a time in a worker process; make it a plain function."
                )

    def check_labels(self, prompts: Sequence[Prompt], path: str) -> None:
        """Raise ConfigError for the first label that the rule cannot read."""
        if self._custom is not None:
            return
        rule = load_rule(self.config.rm_type)
        for prompt in prompts:
            try:
                rule.check_label(prompt.label)
            except ValueError as error:
                raise ConfigError(
                    f"{path}: prompt {prompt.index}, label={prompt.label!r}: --rm-type "
                    f"{self.config.rm_type} cannot read it: {error}. Correct the row, or choose "
                    "another rule."
                ) from error

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Set every sample's reward; return metrics. A timeout scores 0 and is counted."""
        jobs = [self._submit(sample) for sample in samples]
        timeouts = 0
        for sample, job in zip(samples, jobs, strict=True):
            try:
                _set_reward(sample, job.result(), self.config)
            except FutureTimeout:
                timeouts += 1
                sample.reward = 0.0
        return {"rollout/reward_timeouts": float(timeouts)}

    def close(self) -> None:
        """End the worker process."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()

    def _submit(self, sample: Sample) -> Any:
        if self._pool is None:
            self._pool = ProcessPool(max_workers=1)
        limit = self.config.rm_time_limit
        if self._custom is not None:
            return self._pool.schedule(self._custom, args=[sample], timeout=limit)
        arguments = [self.config.rm_type, sample.response, sample.prompt.label]
        return self._pool.schedule(_score, args=arguments, timeout=limit)


def _score(rule: str, response: str, label: str) -> Scored:
    return load_rule(rule).score(response, label)


def _set_reward(sample: Sample, scored: Any, config: RewardConfig) -> None:
    name = f"--custom-rm-path {config.custom_rm_path}" if config.custom_rm_path else config.rm_type
    parts = scored if isinstance(scored, dict) else {"score": scored}
    if "score" not in parts:
        raise ConfigError(f'{name} returned {scored!r}: a dict must hold the reward under "score".')
    try:
        numbers = {key: float(value) for key, value in parts.items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} returned {scored!r}: it must be a number or numbers.") from error
    sample.reward = numbers.pop("score")
    sample.reward_parts = numbers
    if not math.isfinite(sample.reward):
        raise ConfigError(f"{name} returned {sample.reward}: a reward must be finite.")
