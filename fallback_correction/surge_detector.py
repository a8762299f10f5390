"""Online detection of the step at which the mean response length surges."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from fallback_correction.config.length_decay import SurgeDetectorConfig


class SurgeDetector:
    """A detector that reports once at which step the length surged; its plain Python floats give the
    same result on every machine.

    It is an online version of the visual judgement in arXiv 2602.01826, figure 6. A fast rise is a run
    of consecutive steps above `onset_ratio` times the baseline, which is frozen meanwhile. A slow rise
    is found by looking back: its baseline is of the window that ended `slow_rise_steps` ago, and it
    begins where the median of `confirmation_steps` steps last rises above `onset_ratio` times that
    baseline. Either is a surge if the last `confirmation_steps` steps are all above `rise_ratio` times
    the baseline, and if it did not begin in the burn-in.
    """

    def __init__(self, config: SurgeDetectorConfig | None = None) -> None:
        self.config = config or SurgeDetectorConfig()
        self.step = 0
        """Number of rollout steps seen."""
        self.onset: int | None = None
        """First step of the surge; None until it is confirmed, then fixed."""
        self.confirmed_at: int | None = None
        """Step at which the surge was confirmed."""
        self.ratio = 1.0
        """Corrected length of the last step, divided by the baseline."""
        self._settled: list[float] = []
        self._rise: list[float] = []
        self._recent: list[float] = []

    @property
    def baseline(self) -> float | None:
        """Return the upper quartile, in tokens, of the window before the rise; None before the first
        step."""
        return _upper_quartile(self._settled) if self._settled else None

    def update(self, mean_length: float, truncated_ratio: float = 0.0) -> int | None:
        """Add one rollout step; return the onset on the step that confirms the surge, else None.

        `mean_length` is the mean number of model tokens (no tool output) of all responses sampled in
        the step on all ranks, before any filtering; `truncated_ratio` is the share of them that was
        truncated at the maximum length, in [0, 1]. Raises ValueError for other numbers.
        """
        length = self._corrected(mean_length, truncated_ratio)
        baseline = self.baseline or length
        self.step += 1
        self.ratio = length / baseline
        if self.onset is not None:
            return None
        kept = self.config.baseline_window + self.config.slow_rise_steps
        self._recent = [*self._recent, length][-kept:]
        self.onset = self._fast_onset(length, baseline) or self._slow_onset()
        if self.onset is not None:
            self.confirmed_at = self.step
        return self.onset

    def _corrected(self, mean_length: float, truncated_ratio: float) -> float:
        """Return tokens divided by finished responses: the maximum-likelihood mean of truncated
        exponential lengths."""
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

    def _fast_onset(self, length: float, baseline: float) -> int | None:
        """Return the first step of the run above the baseline, if the run is high enough by now."""
        if self.ratio < self.config.onset_ratio:
            self._settle([*self._rise, length])
            return None
        self._rise.append(length)
        onset = self.step - len(self._rise) + 1
        if onset > self.config.burn_in and self._is_high(self._rise, baseline):
            return onset
        if len(self._rise) >= self.config.max_rise_steps:
            self._settle(self._rise)
        return None

    def _slow_onset(self) -> int | None:
        """Return the first step from which lengths stay above the level of `slow_rise_steps` ago, if
        there is one."""
        steps, half = self.config.slow_rise_steps, self.config.confirmation_steps // 2
        level, since = self._recent[:-steps], self._recent[-steps:]
        middle = len(level) // 2
        if len(level) < max(self.config.baseline_window // 2, 2):
            return None
        baseline = _upper_quartile(level)
        if not self._is_high(since, baseline):
            return None
        if median(level[middle:]) > self.config.level_ratio * median(level[:middle]):
            return None
        # The onset follows the last step at which the running median is below the threshold.
        smooth = [median(since[max(i - half, 0) : i + half + 1]) for i in range(steps)]
        low = [i for i, x in enumerate(smooth) if x < self.config.onset_ratio * baseline]
        onset = self.step - steps + 2 + low[-1] if low else 0
        return onset if onset > self.config.burn_in else None

    def _is_high(self, lengths: list[float], baseline: float) -> bool:
        last = lengths[-self.config.confirmation_steps :]
        is_long_enough = len(last) == self.config.confirmation_steps
        return is_long_enough and min(last) >= self.config.rise_ratio * baseline

    def _settle(self, lengths: list[float]) -> None:
        """End a rise that was no surge: its lengths join the baseline's window."""
        self._settled = (self._settled + lengths)[-self.config.baseline_window :]
        self._rise = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, JSON-compatible."""
        return {
            "step": self.step,
            "onset": self.onset,
            "confirmed_at": self.confirmed_at,
            "ratio": self.ratio,
            "settled": list(self._settled),
            "rise": list(self._rise),
            "recent": list(self._recent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; an older state lacks the data of slow rises."""
        self.step = state["step"]
        self.onset = state["onset"]
        self.confirmed_at = state["confirmed_at"]
        self.ratio = state["ratio"]
        self._settled = list(state["settled"])
        self._rise = list(state["rise"])
        self._recent = list(state.get("recent", []))


def _upper_quartile(lengths: list[float]) -> float:
    return sorted(lengths)[3 * (len(lengths) - 1) // 4]
