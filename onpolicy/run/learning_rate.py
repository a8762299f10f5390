"""The learning rate of every optimizer step: base schedule x length decay x governor."""

from dataclasses import dataclass, field
from typing import Any

from fallback_correction.length_decay import LengthDecay
from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.system.records import Count, Shape
from onpolicy.training.rates import base_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decay:
    """The fields of `LengthDecay.state_dict`, less the detector's own; none without length decay."""

    num_rollout_steps: Count = 0
    num_decays: Count = 0
    scale: float = 1.0
    detector: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    steps_taken: Count
    length_decay: _Decay


_SHAPE = Shape(_State, is_open=True)


class LearningRate:
    """The learning rates of a run's optimizer steps, which trainers get as numbers."""

    def __init__(self, config: TrainConfig):
        self.config = config.trainer
        self.without = config.critic.num_critic_only_steps * config.steps_per_rollout
        self.total_steps = config.rollout.num_rollout * config.steps_per_rollout - self.without
        self.steps_taken = 0
        self.decay: LengthDecay | None = None
        if self.config.lr_schedule == "length-decay":
            self.decay = LengthDecay(self.config.length_decay)

    def observe(self, mean_response_length: float, truncated_ratio: float) -> None:
        """Take in a rollout before its optimizer steps; the numbers must be equal on all ranks.
        mean_response_length: mean tokens of all sampled responses, before any filter.
        truncated_ratio: the fraction that was cut off."""
        if self.decay is not None:
            self.decay.step(mean_response_length, truncated_ratio)

    def next_rates(self, num_steps: int, governor: float = 1.0) -> list[float]:
        """Return the rates of the next steps, which count as taken. governor: a factor on them."""
        first = self.steps_taken - self.without
        steps = [max(first + i, 0) for i in range(num_steps)]
        self.steps_taken += num_steps
        # Another order of the factors would round otherwise.
        rates = [self.config.lr * base_factor(s, self.config, self.total_steps) for s in steps]
        if self.decay is not None:
            rates = [rate * self.decay.scale for rate in rates]
            governor = self.decay.bounded(governor)
        return [rate * governor for rate in rates]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of length decay, if there is one."""
        return {} if self.decay is None else self.decay.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next rates depend on besides settings, as JSON values."""
        decay = {} if self.decay is None else self.decay.state_dict()
        return {"steps_taken": self.steps_taken, "length_decay": decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ConfigError if it belongs to another schedule."""
        try:
            _SHAPE.take(state)
            if bool(state["length_decay"]) != (self.decay is not None):
                raise ValueError(f"length_decay={state['length_decay']}")
            self.steps_taken = state["steps_taken"]
            if self.decay is not None:
                self.decay.load_state_dict(state["length_decay"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "--load: what the checkpoint holds of the learning rate's schedule does not fit these "
                f"settings ({error!r}). Give --lr-schedule as in the run that wrote it."
            ) from error
