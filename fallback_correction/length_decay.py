"""Periodic halving of the learning rate, with a period derived from the surge of the response length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from fallback_correction.config.length_decay import LengthDecayConfig
from fallback_correction.surge_detector import SurgeDetector


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


class BaseSchedule(Protocol):
    """The common interface of torch's `LRScheduler` and Megatron's `OptimizerParamScheduler`."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class HasParamGroups(Protocol):
    """The common interface of torch's `Optimizer` and Megatron's `MegatronOptimizer`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


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
