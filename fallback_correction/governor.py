"""The governor, which chooses a run's correction from the measured mismatch: a ladder of rungs.

stock: no correction; tis: importance weights, centered scores or the discrepancy penalty, as
configured; mis: rejection and veto in addition; decay: a smaller learning rate in addition; aligned:
aligned operators, which are exact and may be slower. It climbs after some consecutive rollouts beyond a
limit, and climbs down after more of them well within all limits. On the aligned rung there is no
mismatch to measure, so it tries the rung below after a while; every climb down doubles the calm that
the next one needs, so that a run does not oscillate for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fallback_correction.config.governor_settings import GovernorConfig
from fallback_correction.ranges import require_choice, require_choices

Rung = Literal["stock", "tis", "mis", "decay", "aligned"]

RUNGS: tuple[Rung, ...] = ("stock", "tis", "mis", "decay", "aligned")

READINGS = ("k3", "ess", "log_ppl_abs_diff")
"""Metrics that it reads, from `mismatch_metrics` or a probe (`onpolicy/run/probe.py`)."""

LONGEST_CALM = 64
"""Largest multiple of `fall_after`."""


@dataclass(frozen=True, slots=True)
class Move:
    """A step on the ladder, with its reason."""

    before: Rung
    after: Rung
    reason: str

    def __post_init__(self) -> None:
        require_choices(self)


class Governor:
    """The ladder's state. Equal readings make equal moves, on every rank."""

    def __init__(self, config: GovernorConfig, rung: Rung = "stock"):
        require_choice("rung", rung, Rung)
        self.config, self.rung = config, rung
        self._bad, self._calm, self._falls = 0, 0, 0

    def update(self, k3: float, ess: float, log_ppl_abs_diff: float) -> Move | None:
        """Take the readings of one rollout; return the resulting move, if any."""
        shares = {
            f"k3={k3:.3g}, limit {self.config.k3:g}": k3 / self.config.k3,
            f"ess={ess:.4f}, limit {self.config.ess:g}": (1 - ess) / (1 - self.config.ess),
            f"log_ppl_abs_diff={log_ppl_abs_diff:.3g}, limit {self.config.log_ppl_abs_diff:g}": (
                log_ppl_abs_diff / self.config.log_ppl_abs_diff
            ),
        }
        # A NaN reading counts as beyond the limit.
        worst = max(shares, key=lambda name: (not shares[name] <= 1, shares[name]))
        is_bad, is_calm = not shares[worst] <= 1, shares[worst] < self.config.calm
        self._bad = self._bad + 1 if is_bad else 0
        self._calm = self._calm + 1 if is_calm else 0
        if self._bad >= self.config.rise_after and self.rung != self.config.highest:
            return self._move(+1, f"{worst}, {self._bad} rollouts in a row")
        if self._calm >= self.calm_needed and self.rung != RUNGS[0]:
            reason = f"{self._calm} calm rollouts in a row"
            self._falls += 1
            return self._move(-1, reason)
        return None

    @property
    def calm_needed(self) -> int:
        """Return the number of calm rollouts before the next climb down."""
        rollouts: int = self.config.fall_after * min(2**self._falls, LONGEST_CALM)
        return rollouts

    @property
    def lr_scale(self) -> float:
        """Return the factor of the learning rate on this rung."""
        return self.config.lr_scale if self.rung == "decay" else 1.0

    def _move(self, direction: int, reason: str) -> Move:
        before, self.rung = self.rung, RUNGS[RUNGS.index(self.rung) + direction]
        self._bad = self._calm = 0
        return Move(before, self.rung, reason)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next moves depend on."""
        return {"rung": self.rung, "bad": self._bad, "calm": self._calm, "falls": self._falls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_choice("rung", state["rung"], Rung)
        self.rung = state["rung"]
        self._bad, self._calm, self._falls = state["bad"], state["calm"], state["falls"]
