"""The keys of Miles' and slime's `mis.yaml`, read from an `args` object and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fallback_correction.choices import require_choices
from fallback_correction.config import Mode, WeightLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class MisSettings:
    """The keys with their fallbacks resolved. Bounds are of rho = pi_train / pi_rollout."""

    use_tis: bool
    tis_level: WeightLevel
    tis_mode: Mode
    tis_lower: float
    tis_upper: float
    batch_normalize: bool

    use_rs: bool
    rs_level: WeightLevel
    rs_lower: float
    rs_upper: float

    veto: float | None
    """A token with a smaller rho rejects its sequence."""

    fixed: bool
    """`mis_fixed`, the one key that is ours."""

    def __post_init__(self) -> None:
        require_choices(self)
        if self.use_tis and self.tis_mode != "truncate":
            _require_order("tis", self.tis_lower, self.tis_upper)
        if self.use_rs:
            _require_order("rs", self.rs_lower, self.rs_upper)


def read_settings(args: Any) -> MisSettings:
    """Read the keys; one that `args` lacks has its default in Miles (`MisConfig` in its mis.py).

    Fallbacks: tis_lower_bound 1 / tis_upper_bound, rs_*_bound the tis bound of that side. A bound of
    0 is a bound. Raises ValueError for a value that no key may have.
    """
    upper = _number(args, "tis_upper_bound", 2.0)
    if upper is None or not upper > 0:
        raise ValueError(f"tis_upper_bound={upper}: must be greater than 0. Miles' default is 2.0.")
    lower = _or(_number(args, "tis_lower_bound", 0.5), 1 / upper)
    return MisSettings(
        use_tis=bool(getattr(args, "use_tis", False)),
        tis_level=getattr(args, "tis_level", "token"),
        tis_mode=getattr(args, "tis_mode", "truncate"),
        tis_lower=lower,
        tis_upper=upper,
        batch_normalize=bool(getattr(args, "tis_batch_normalize", False)),
        use_rs=bool(getattr(args, "use_rs", False)),
        rs_level=getattr(args, "rs_level", "token"),
        rs_lower=_or(_number(args, "rs_lower_bound", None), lower),
        rs_upper=_or(_number(args, "rs_upper_bound", None), upper),
        veto=_number(args, "rs_veto_threshold", 1e-4),
        fixed=bool(getattr(args, "mis_fixed", False)),
    )


def _number(args: Any, name: str, default: float | None) -> float | None:
    value = getattr(args, name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(
            f"{name}={value!r}: must be a number. In YAML write 1.0e-4, since 1e-4 is a string there."
        )
    if value < 0:
        raise ValueError(f"{name}={value}: a bound of a ratio is at least 0. Use 0 for no bound.")
    return float(value)


def _or(value: float | None, fallback: float) -> float:
    return fallback if value is None else value


def _require_order(prefix: str, lower: float, upper: float) -> None:
    if not lower <= upper:
        raise ValueError(
            f"{prefix}_lower_bound={lower}, {prefix}_upper_bound={upper}: the lower bound must not "
            "exceed the upper one. Null bounds fall back to the tis bounds and 1 / tis_upper_bound."
        )
