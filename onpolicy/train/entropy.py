"""The entropy bonus of the loss: its coefficient, and the control that moves it to a target."""

from __future__ import annotations

from typing import Any

from onpolicy.config.groups import AlgorithmConfig


class EntropyBonus:
    """The coefficient of the mean entropy that is subtracted from a rollout's loss.

    adaptive: Skywork-OR1's control (arXiv 2505.22312), as in TRL's `GRPOTrainer._compute_loss`. After a
    rollout with an entropy of at most the target, the coefficient rises by `entropy_coef_delta`, up to
    `entropy_coef_max`, and the next loss has a bonus; otherwise it falls by the same step, down to 0,
    and the next loss has none.
    """

    def __init__(self, flags: AlgorithmConfig):
        self.flags = flags
        self._coef, self._is_needed = flags.entropy_coef, not self.is_adaptive

    @property
    def coef(self) -> float:
        """Return the coefficient of the next rollout's loss."""
        return self._coef if self._is_needed else 0.0

    @property
    def is_adaptive(self) -> bool:
        return self.flags.entropy_ctrl == "adaptive"

    def step(self, entropy: float) -> dict[str, float]:
        """Move the coefficient after a rollout with this mean entropy, in nats; return metrics of its
        loss."""
        metrics = {"train/entropy_coef": self.coef} if self.is_adaptive else {}
        if self.is_adaptive:
            self._is_needed = entropy <= self.flags.entropy_target
            delta, largest = self.flags.entropy_coef_delta, self.flags.entropy_coef_max
            moved = self._coef + (delta if self._is_needed else -delta)
            self._coef = min(max(moved, 0.0), largest)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on."""
        return {"coef": self._coef, "is_needed": self._is_needed} if self.is_adaptive else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coef = float(state.get("coef", self._coef))
        self._is_needed = bool(state.get("is_needed", self._is_needed))
