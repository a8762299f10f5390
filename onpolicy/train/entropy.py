"""The entropy bonus of the loss: its coefficient, and how that moves to a target."""

from __future__ import annotations

from typing import Any

from onpolicy.config.groups import AlgorithmConfig


class EntropyBonus:
    """What the mean entropy of a rollout's tokens is multiplied by in its loss, and taken off it.

    adaptive: Skywork-OR1's control (arXiv 2505.22312), as in TRL's `GRPOTrainer._compute_loss`. After a
    rollout whose entropy is at most the target the coefficient rises by `entropy_coef_delta`, to no more
    than `entropy_coef_max`, and otherwise it falls by that, to no less than 0; the loss has a bonus only
    after a rollout of the former kind.
    """

    def __init__(self, flags: AlgorithmConfig):
        self.flags = flags
        self._coef, self._is_needed = flags.entropy_coef, not self.is_adaptive

    @property
    def coef(self) -> float:
        """That of the next rollout's loss."""
        return self._coef if self._is_needed else 0.0

    @property
    def is_adaptive(self) -> bool:
        return self.flags.entropy_ctrl == "adaptive"

    def step(self, entropy: float) -> dict[str, float]:
        """After a rollout of this mean entropy, in nats; what metrics say of its loss."""
        metrics = {"train/entropy_coef": self.coef} if self.is_adaptive else {}
        if self.is_adaptive:
            self._is_needed = entropy <= self.flags.entropy_target
            delta, largest = self.flags.entropy_coef_delta, self.flags.entropy_coef_max
            moved = self._coef + (delta if self._is_needed else -delta)
            self._coef = min(max(moved, 0.0), largest)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout depends on."""
        return {"coef": self._coef, "is_needed": self._is_needed} if self.is_adaptive else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._coef = float(state.get("coef", self._coef))
        self._is_needed = bool(state.get("is_needed", self._is_needed))
