"""Flags, values of flags and commands that earlier releases had, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.errors import ConfigError

DEPLOY = "examples/deploy/compress.py writes what a run with rounded weights deployed."
FIRST_OPERATOR = "onpolicy explain names the first operator that differs, without it."

GONE: dict[str, str] = {
    "--activations": DEPLOY,
    "--align": "--true-on-policy-mode aligns all kinds of operators.",
    "--attribution": FIRST_OPERATOR,
    "--orders": FIRST_OPERATOR,
    "--quantised": DEPLOY,
    "--rollout-activation-format int8": "Use --rollout-activation-format fp8_e4m3.",
    "--rollout-kv-format": "Leave it out: the cache is in --dtype.",
    "--rollout-pack-weights": "Leave it out: servers keep weights in --dtype, with the same bits.",
    "--rollout-weight-format int3_group128": "Use --rollout-weight-format int3 or int4_group128.",
    "--rollout-weight-format mxfp4": "Use --rollout-weight-format int4_group128.",
    "--rollout-weight-format nvfp4": "Use --rollout-weight-format int4_group128.",
    "--train-pack-weights": "Leave it out: the base of adapters is rounded and kept in --dtype.",
}
"""What to use instead, by `--flag`, by `--flag value`, or by a command's name."""


def require_not_gone(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first flag, or value of a flag, that is gone."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-").replace("--no-", "--", 1)
        with_value = f"{flag} {value if equals else following}"
        for gone in (flag, with_value):
            if gone in GONE:
                raise ConfigError(f"{gone}: was removed from onpolicy. {GONE[gone]}")
