"""Finds the step at which the mean response length surges, as the run goes along."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SurgeDetectorConfig:
    """What counts as a surge. Steps are rollout steps, counted from 1.

    Raises ValueError for settings under which no surge could ever be found.
    """

    burn_in: int = 10
    """No surge is confirmed before this step; a rise that is over by then is none. Example: 10"""

    baseline_window: int = 40
    """Steps before the rise whose upper quartile is the baseline. A larger window forgives longer
    dips, a smaller one forgets sooner how long the responses were at the start. Example: 40"""

    rise_ratio: float = 2.0
    """A surge is at least this many times the baseline. Example: 2.0"""

    onset_ratio: float = 1.25
    """The onset is the first step of the rise above this many times the baseline. Example: 1.25"""

    confirmation_steps: int = 5
    """Consecutive steps that must have the rise ratio. Example: 5"""

    max_rise_steps: int = 20
    """Steps from the onset to the confirmation at most: a slower rise is growth. Example: 20"""

    max_truncated_ratio: float = 0.8
    """Truncated ratios above this are taken as this: the correction is bounded. Example: 0.8"""

    def __post_init__(self) -> None:
        for name in ("burn_in", "baseline_window", "confirmation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be at least 1. Use 1 or more."
                )
        if not 1 < self.onset_ratio <= self.rise_ratio:
            raise ValueError(
                f"onset_ratio={self.onset_ratio}, rise_ratio={self.rise_ratio}: must rise from 1. "
                "Use 1 < onset_ratio <= rise_ratio."
            )
        if self.max_rise_steps < self.confirmation_steps:
            raise ValueError(
                f"max_rise_steps={self.max_rise_steps}: must leave room for the "
                f"{self.confirmation_steps} confirmation steps. Use at least as many."
            )
        if not 0 <= self.max_truncated_ratio < 1:
            raise ValueError(
                f"max_truncated_ratio={self.max_truncated_ratio}: must be in [0, 1). Use 0.8."
            )


class SurgeDetector:
    """Says once at which step the length surged; pure Python floats, the same on every machine.

    The online version of what arXiv 2602.01826, figure 6, leaves to the eye. A rise is a run of
    consecutive steps above `onset_ratio` times the baseline, which stands still meanwhile. The rise
    is a surge if its last `confirmation_steps` steps are all above `rise_ratio` times the baseline.
    """

    def __init__(self, config: SurgeDetectorConfig | None = None) -> None:
        self.config = config or SurgeDetectorConfig()
        self.step = 0
        """Rollout steps seen."""
        self.onset: int | None = None
        """First step of the surge; None until it is confirmed, then never changes."""
        self.confirmed_at: int | None = None
        """Step at which the surge was confirmed."""
        self.ratio = 1.0
        """Corrected length of the last step over the baseline."""
        self._settled: list[float] = []
        self._rise: list[float] = []

    @property
    def baseline(self) -> float | None:
        """Upper quartile, in tokens, of the window before the rise; None before the first step."""
        if not self._settled:
            return None
        return sorted(self._settled)[3 * (len(self._settled) - 1) // 4]

    def update(self, mean_length: float, truncated_ratio: float = 0.0) -> int | None:
        """Take in one rollout step; the onset on the step that confirms the surge, else None.

        `mean_length` is the mean number of model tokens (no tool output) of all responses sampled in
        the step on all ranks, before any filtering; `truncated_ratio` is the share of them that was
        cut off at the maximum length, in [0, 1]. Raises ValueError for other numbers.
        """
        length = self._corrected(mean_length, truncated_ratio)
        baseline = self.baseline or length
        self.step += 1
        self.ratio = length / baseline
        if self.onset is not None:
            return None
        if self.ratio < self.config.onset_ratio:
            self._settle([*self._rise, length])
            return None
        self._rise.append(length)
        if self._is_surge(baseline):
            self.confirmed_at = self.step
            self.onset = self.step - len(self._rise) + 1
        elif len(self._rise) >= self.config.max_rise_steps:
            self._settle(self._rise)
        return self.onset

    def _corrected(self, mean_length: float, truncated_ratio: float) -> float:
        """Tokens over finished responses: the maximum-likelihood mean of cut-off exponential lengths."""
        if not (math.isfinite(mean_length) and mean_length > 0):
            raise ValueError(
                f"mean_length={mean_length}: must be a positive number of tokens. "
                "Give the mean over all sampled responses."
            )
        if not 0 <= truncated_ratio <= 1:
            raise ValueError(
                f"truncated_ratio={truncated_ratio}: must be in [0, 1]. "
                "Give the share of responses that were cut off."
            )
        return mean_length / (1 - min(truncated_ratio, self.config.max_truncated_ratio))

    def _is_surge(self, baseline: float) -> bool:
        last = self._rise[-self.config.confirmation_steps :]
        return (
            self.step >= self.config.burn_in
            and len(last) == self.config.confirmation_steps
            and all(length >= self.config.rise_ratio * baseline for length in last)
        )

    def _settle(self, lengths: list[float]) -> None:
        """End a rise that was no surge: its lengths become part of the baseline's window."""
        self._settled = (self._settled + lengths)[-self.config.baseline_window :]
        self._rise = []

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps depend on, as JSON can hold it."""
        return {
            "step": self.step,
            "onset": self.onset,
            "confirmed_at": self.confirmed_at,
            "ratio": self.ratio,
            "settled": list(self._settled),
            "rise": list(self._rise),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.step = state["step"]
        self.onset = state["onset"]
        self.confirmed_at = state["confirmed_at"]
        self.ratio = state["ratio"]
        self._settled = list(state["settled"])
        self._rise = list(state["rise"])
