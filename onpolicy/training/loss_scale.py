"""The scale of the loss under --dtype float16, in which a gradient below 6e-8 is zero and one above
65,504 infinite (Micikevicius et al., arXiv:1710.03740, section 3.2).

It starts, falls and grows as torch.amp.GradScaler's does by default, which steps the optimizer itself
and cannot do so in blocks. A power of two changes no bit of a gradient within float16's range.
"""

from __future__ import annotations

from typing import Any

from onpolicy.errors import CheckpointError

FIRST = 2.0**16

GROWTH_INTERVAL = 2000
"""Number of steps without an overflow after which the scale doubles."""

POWERS = [2.0**n for n in range(128)]
"""Possible scales: below the least one the gradients themselves do not fit, and float32 holds no larger
one."""


class LossScale:
    """A loss's factor, which its float32 gradients are divided by after their sum over the ranks.

    All ranks see one gradient norm, so they agree on it without a message.
    """

    def __init__(self) -> None:
        self.value = FIRST
        self.good_steps = 0
        """Number of steps without an overflow since the scale last changed."""

    def take(self, is_finite: bool) -> None:
        """Count a step with finite gradients, which may double the scale; other gradients halve it."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.value = max(self.value / 2, POWERS[0])
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(2 * self.value, POWERS[-1]), 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next steps depend on, as JSON values."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Any) -> None:
        """Restore a state of `state_dict`. Raises CheckpointError for anything else."""
        known = {"value": POWERS, "good_steps": range(GROWTH_INTERVAL)}
        told = state if isinstance(state, dict) else {}
        if not all(told.get(name) in values for name, values in known.items()):
            raise CheckpointError(
                f"--load: loss_scale={state}: value must be a power of two from 1 to 2**127, "
                f"and good_steps below {GROWTH_INTERVAL}. The checkpoint is damaged; "
                "resume from an earlier one."
            )
        self.value, self.good_steps = told["value"], told["good_steps"]
