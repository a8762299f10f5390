"""The rules of aligned operators: of which kinds, by which backend, and what cannot go with them."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.config import sglang_flags
from onpolicy.config.groups import OperatorsConfig
from onpolicy.errors import ConfigError


def require_operators(
    operators: OperatorsConfig,
    sglang_args: Sequence[str],
    *,
    mode: bool,
    train_backend: str = "fsdp",
) -> None:
    """Raise ConfigError for the first flag that breaks a rule; `mode`: whether every kind is aligned."""
    if operators.align:
        _require_partial(operators.align, operators.operators, sglang_args, mode, train_backend)
    aligned_by = aligning_flag(operators, mode=mode)
    sglang_flags.validate(sglang_args, aligned_by)
    if operators.operators != "auto" and not aligned_by:
        raise ConfigError(
            f"--operators={operators.operators}: without --true-on-policy-mode or --align each engine "
            "runs its own operators. Add one of them, or leave the flag out."
        )


def aligning_flag(operators: OperatorsConfig, *, mode: bool) -> str:
    """The flag by which engines run aligned operators, for messages; empty if they run none."""
    return "--true-on-policy-mode" if mode else "--align" if operators.align else ""


def _require_partial(
    kinds: str, operators: str, sglang_args: Sequence[str], mode: bool, train_backend: str
) -> None:
    degree = sglang_flags.tensor_parallel_size(sglang_args)
    rows = (
        (mode,
         "with --true-on-policy-mode, which verify, explain and serve have on by themselves, every kind "
         "is aligned",
         "Leave one of the two out, by --no-true-on-policy-mode if need be."),
        (train_backend != "fsdp",
         f"the modules of --train-backend {train_backend} run on aligned operators of all kinds or of "
         "none",
         "Leave one of the two out."),
        (operators == "portable",
         "--operators portable is for all kinds: what is left to an engine has no bits of its own",
         "Leave one of the two out."),
        (degree > 1,
         f"the sums that the ranks of --sglang-tp-size {degree} share are aligned with all else or not "
         "at all",
         "Leave one of the two out."),
    )  # fmt: skip
    for is_broken, rule, remedy in rows:
        if is_broken:
            raise ConfigError(f"--align={kinds}: {rule}. {remedy}")
