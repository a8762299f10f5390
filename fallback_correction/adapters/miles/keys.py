"""Translation of the keys of Miles' and slime's `mis.yaml`, in an `args` object, into our own record."""

from __future__ import annotations

import math
from typing import Any

from fallback_correction.config import CorrectionConfig, CorrectionSettings


def read_keys(args: Any) -> CorrectionSettings:
    """Read the keys; a key that `args` lacks has its default in Miles (`MisConfig` in its mis.py).

    Bounds with a fallback in Miles are filled in: tis_lower_bound by 1 / tis_upper_bound, rs_*_bound by
    the tis bound of that side. A bound of 0 is a bound. Raises ValueError for an invalid value.
    """
    use_tis, use_rs = (bool(getattr(args, name, False)) for name in ("use_tis", "use_rs"))
    mode: Any = getattr(args, "tis_mode", "truncate")
    upper = _number(args, "tis_upper_bound", 2.0)
    if upper is None or not upper > 0:
        raise ValueError(f"tis_upper_bound={upper}: must be greater than 0. Miles' default is 2.0.")
    lower = _or(_number(args, "tis_lower_bound", 0.5), 1 / upper)
    rs_lower = _or(_number(args, "rs_lower_bound", None), lower)
    rs_upper = _or(_number(args, "rs_upper_bound", None), upper)
    if use_tis and mode != "truncate":
        _require_order("tis", lower, upper)
    if use_rs:
        _require_order("rs", rs_lower, rs_upper)
    return CorrectionSettings(
        use_tis=use_tis,
        tis_level=getattr(args, "tis_level", "token"),
        tis_mode=mode,
        # Truncation has no lower bound, and the one that it falls back to may exceed the upper one.
        tis_lower_bound=min(lower, upper),
        tis_upper_bound=upper,
        tis_batch_normalize=bool(getattr(args, "tis_batch_normalize", False)),
        use_rs=use_rs,
        rs_level=getattr(args, "rs_level", "token"),
        rs_lower_bound=rs_lower if use_rs else None,
        rs_upper_bound=rs_upper if use_rs else None,
        rs_veto_threshold=_number(args, "rs_veto_threshold", 1e-4),
        rejected_in_denominator=False,
    )


def is_fixed(args: Any) -> bool:
    """Return `mis_fixed`, our own key; `hook` explains it."""
    return bool(getattr(args, "mis_fixed", False))


def correction_config(args: Any) -> CorrectionConfig:
    """Return the correction of the keys under `mis_fixed`, whether it is set or not. Raises ValueError
    for bad keys."""
    return read_keys(args).correction()


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
