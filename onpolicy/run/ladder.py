"""The governor's rungs as settings of the engines: contract, corrections, learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fallback_correction.config import DiscrepancyConfig
from fallback_correction.governor import READINGS, RUNGS, Governor, Move, Rung
from onpolicy.config import TrainConfig
from onpolicy.config.groups import FallbackConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.system.records import Count, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Governor:
    """The fields of `Governor.state_dict`."""

    rung: str
    bad: Count
    calm: Count
    falls: Count


_GOVERNOR = Shape(_Governor)


class Ladder:
    """The position of a run with a governor between stock and aligned."""

    def __init__(
        self, config: TrainConfig, stock: NumericsContract, aligned: NumericsContract | None
    ):
        self.config, self._stock, self._aligned = config, stock, aligned
        self._governor = Governor(config.governor.limits, first_rung(config))

    @property
    def contract(self) -> NumericsContract:
        """Return the contract of both engines at present."""
        if self._governor.rung != "aligned":
            return self._stock
        assert self._aligned is not None
        return self._aligned

    @property
    def fallback(self) -> FallbackConfig:
        """Return the corrections in force at present. Stock has none; from tis on there are
        importance weights (with --policy-loss centered only if --use-tis is given), the discrepancy
        penalty, and the user's own function; from mis on rejection and the veto. Stale samples get
        importance weights on stock, too."""
        height, flags = RUNGS.index(self._governor.rung), self.config.fallback
        weighs = self.config.plan.weighs_lag or (
            height >= 1 and (flags.use_tis or not self.config.num_centered)
        )
        flags = replace(flags, use_tis=weighs, use_rs=height >= 2, get_mismatch_metrics=True)
        if height < 1:
            flags = replace(flags, dc=DiscrepancyConfig.off(), custom_tis_function_path="")
        if height >= 2:
            return flags
        return replace(flags, rs_veto_threshold=None)

    @property
    def centers(self) -> bool:
        """Return whether scores are centered at present, in a run with --policy-loss centered."""
        return self._governor.rung != "stock"

    @property
    def lr_scale(self) -> float:
        """Return the factor on the learning rate at present."""
        return self._governor.lr_scale

    def update(self, metrics: Mapping[str, float]) -> Move | None:
        """Take in a rollout's metrics, which must be equal on all ranks; return the move that follows,
        if any. Where tokens may be stale, they would measure staleness, so the probe's are used."""
        if "parity/num_compared_tokens" not in metrics:
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
        return {"governor/rung": float(RUNGS.index(self._governor.rung))}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later moves depend on."""
        return self._governor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ConfigError if it is no state of a governor."""
        if not state:
            return
        try:
            _GOVERNOR.take(dict(state))
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
    if {"use_rs", "rs_veto_threshold"}.intersection(plan.corrections):
        return "mis"
    return "tis" if plan.corrections or config.num_centered else "stock"
