"""Periodic halving of the learning rate, with a period derived from the surge of the response length.

`SurgeDetector` finds the step at which the mean response length surges, while the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fallback_correction.config.length_decay_settings import LengthDecayConfig, SurgeDetectorConfig


class LengthDecay:
    """The scale of the learning rate by Algorithm 1, with a given period or one found online.

    Without a given period nothing decays before the surge is confirmed, or `default_period` is over.
    From then on the scale follows Algorithm 1 with that fixed period; decays that are overdue by then
    happen at once.
    """

    def __init__(self, config: LengthDecayConfig | None = None) -> None:
        self.config = config or LengthDecayConfig()
        self.detector = SurgeDetector(self.config.detector)
        self.num_rollout_steps = 0
        """Number of calls of `step`: Algorithm 1's t."""
        self.num_decays = 0
        """Number of decays; none is counted once the floor is reached."""
        self._found_period: int | None = None
        self.scale = 1.0
        """Factor of the base schedule's learning rate, from `floor` to 1."""

    @property
    def period(self) -> int | None:
        """Return the number of rollout steps between two decays; None until known."""
        return self._found_period if self.config.period is None else self.config.period

    def step(self, mean_length: float, truncated_ratio: float = 0.0) -> float:
        """Add one rollout step, before its update, and return the scale for that update.

        The arguments are the same as in `SurgeDetector.update`, which raises ValueError for impossible
        ones.
        """
        self.detector.update(mean_length, truncated_ratio)
        self.num_rollout_steps += 1
        if self._found_period is None:
            self._found_period = self._find_period()
        due = self.num_rollout_steps // self.period if self.period else 0
        while self.num_decays < due and self.scale > self.config.floor:
            self.scale = max(self.scale / self.config.factor, self.config.floor)
            self.num_decays += 1
        return self.scale

    def _find_period(self) -> int | None:
        if self.detector.onset is not None:
            return max(round(self.config.onset_multiplier * self.detector.onset), 1)
        default = self.config.default_period
        return default if default and self.num_rollout_steps >= default else None

    def bounded(self, factor: float) -> float:
        """Bound another factor of the rate, so that its product with `scale` stays above the floor."""
        return max(factor, self.config.floor / self.scale)

    def metrics(self) -> dict[str, float]:
        """Return metrics; onset and period are 0 while unknown."""
        return {
            "lr_decay/scale": self.scale,
            "lr_decay/onset": float(self.detector.onset or 0),
            "lr_decay/period": float(self.period or 0),
            "lr_decay/num_decays": float(self.num_decays),
            "lr_decay/length_ratio": self.detector.ratio,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next steps depend on, JSON-compatible."""
        return {
            "num_rollout_steps": self.num_rollout_steps,
            "num_decays": self.num_decays,
            "scale": self.scale,
            "found_period": self._found_period,
            "detector": self.detector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a new period or floor in the configuration takes
        precedence."""
        self.num_rollout_steps = state["num_rollout_steps"]
        self.num_decays = state["num_decays"]
        self.scale = max(state["scale"], self.config.floor)
        self._found_period = state.get("found_period")
        self.detector.load_state_dict(state["detector"])


def from_rank_0(value: float) -> float:
    """Return rank 0's value on every rank of the default process group; collective if there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class LengthDecaySchedule:
    """A base schedule whose learning rates are multiplied by the scale of `LengthDecay`.

    Call `observe` once a rollout step, before its first update, and `step` instead of the base
    schedule's `step`. The base schedule sees only its own rates.
    """

    def __init__(
        self,
        base: BaseSchedule,
        optimizer: HasParamGroups,
        decay: LengthDecay,
        broadcast: Callable[[float], float] = from_rank_0,
    ) -> None:
        self.base = base
        self.optimizer = optimizer
        self.decay = decay
        self._broadcast = broadcast
        self._base_rates: list[float] = []
        self._scale_rates()

    def observe(self, mean_length: float, truncated_ratio: float = 0.0) -> None:
        """Update the scale from rank 0's numbers, and apply it on all ranks; collective. See
        `LengthDecay.step`."""
        self.decay.step(self._broadcast(mean_length), self._broadcast(truncated_ratio))
        self._restore_base_rates()
        self._scale_rates()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the base schedule with its arguments: Megatron's is `step(increment=...)`."""
        # torch's chainable schedules compute the next rate from the one in the optimizer.
        self._restore_base_rates()
        self.base.step(*args, **kwargs)
        self._scale_rates()

    def get_last_lr(self) -> list[float]:
        """Return the decayed learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the base schedule's state under "base", and the decay's under "length_decay"."""
        decay = {**self.decay.state_dict(), "base_rates": list(self._base_rates)}
        return {"base": self.base.state_dict(), "length_decay": decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`.

        Raises ValueError for the state of a base schedule alone or with another number of groups.
        """
        if "base" not in state or "length_decay" not in state:
            raise ValueError(
                f"state={sorted(state)}: must have base and length_decay. Load a base schedule's "
                "state into it before it is wrapped."
            )
        rates, groups = state["length_decay"]["base_rates"], self.optimizer.param_groups
        if len(rates) != len(groups):
            raise ValueError(
                f"base_rates={rates}: must be one for each of the {len(groups)} parameter groups. "
                "Build the optimizer as in the run that was saved."
            )
        self.decay.load_state_dict(state["length_decay"])
        # Loading sets no rates in torch, and all of them in Megatron, whose rates then prevail.
        self._base_rates = list(rates)
        self._restore_base_rates()
        self.base.load_state_dict(state["base"])
        self._scale_rates()

    def _restore_base_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            _set_rate(group, rate)

    def _scale_rates(self) -> None:
        """Store the optimizer's rates as the base schedule's own, and multiply them."""
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            _set_rate(group, rate * self.decay.scale)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's rate; a tensor is filled in place, since captured graphs and compiled steps keep
    reading it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class BaseSchedule(Protocol):
    """The common interface of torch's `LRScheduler` and Megatron's `OptimizerParamScheduler`."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class HasParamGroups(Protocol):
    """The common interface of torch's `Optimizer` and Megatron's `MegatronOptimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


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
