"""The governor's rungs as settings of the engines: contract, corrections, learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from fallback_correction.config import DiscrepancyConfig
from fallback_correction.governor import READINGS, RUNGS, Governor, Move, Rung
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.system.records import checked


class _Governor(TypedDict):
    """The fields of `Governor.state_dict`."""

    rung: str
    bad: Annotated[int, Ge(0)]
    calm: Annotated[int, Ge(0)]
    falls: Annotated[int, Ge(0)]


_GOVERNOR = TypeAdapter(_Governor)


class Ladder:
    """A run's position between stock and aligned; without a governor it stays where it started."""

    def __init__(
        self, config: TrainConfig, stock: NumericsContract, aligned: NumericsContract | None
    ):
        self.config, self._stock, self._aligned = config, stock, aligned
        limits, governed = config.governor.limits, config.plan.is_governed
        self._governor = Governor(limits, first_rung(config)) if governed else None

    @property
    def contract(self) -> NumericsContract:
        """Return the contract of both engines at present."""
        rung = first_rung(self.config) if self._governor is None else self._governor.rung
        if rung != "aligned":
            return self._stock
        assert self._aligned is not None
        return self._aligned

    @property
    def fallback(self) -> FallbackConfig:
        """Return the corrections in force at present.

        With a governor, stock has none; from tis on there are importance weights, the discrepancy
        penalty, and the user's own function; from mis on rejection, the veto and M2PO. Stale samples get
        importance weights on stock, too.
        """
        flags, plan = self.config.fallback, self.config.plan
        if plan.bypasses_lag:
            return replace(flags, use_rollout_logprobs=True)
        if self._governor is None:
            return replace(flags, use_tis=True) if plan.weighs_lag else flags
        height = RUNGS.index(self._governor.rung)
        weighs = height >= 1 or plan.weighs_lag
        flags = replace(flags, use_tis=weighs, use_rs=height >= 2, get_mismatch_metrics=True)
        if height < 1:
            flags = replace(flags, dc=DiscrepancyConfig.off(), custom_tis_function_path="")
        if height >= 2:
            return flags
        return replace(flags, rs_veto_threshold=None, m2po_threshold=None)

    @property
    def lr_scale(self) -> float:
        """Return the factor on the learning rate at present."""
        return 1.0 if self._governor is None else self._governor.lr_scale

    def update(self, metrics: Mapping[str, float]) -> Move | None:
        """Take in a rollout's metrics, which must be equal on all ranks; return the move that follows,
        if any.

        Where tokens may be stale, these metrics would measure staleness, so the probe's readings are
        used.
        """
        if self._governor is None or "parity/num_compared_tokens" not in metrics:
            return None
        if self.config.plan.may_lag:
            return self._governor.update(**{name: metrics[f"probe/{name}"] for name in READINGS})
        return self._governor.update(
            k3=metrics.get("mismatch/k3", metrics["train/k3_kl"]),
            ess=metrics.get("mismatch/ess", 1.0),
            log_ppl_abs_diff=metrics.get("mismatch/log_ppl_abs_diff", 0.0),
        )

    def metrics(self) -> dict[str, float]:
        """Return the rung's number, for the log."""
        if self._governor is None:
            return {}
        return {"governor/rung": float(RUNGS.index(self._governor.rung))}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later moves depend on."""
        return {} if self._governor is None else self._governor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ConfigError if it is no state of a governor."""
        if self._governor is None or not state:
            return
        try:
            checked(_GOVERNOR, dict(state))
            self._governor.load_state_dict(state)
        except ValueError as error:
            raise ConfigError(
                f"--load: what the checkpoint holds of the governor is no state of one ({error}). "
                "Resume from an earlier checkpoint, or with the version that wrote it."
            ) from error


def first_rung(config: TrainConfig) -> Rung:
    """Return the rung that the flags describe."""
    plan = config.plan
    if plan.starts_aligned:
        return "aligned"
    if {"use_rs", "rs_veto_threshold", "m2po_threshold"}.intersection(plan.corrections):
        return "mis"
    return "tis" if plan.corrections else "stock"
