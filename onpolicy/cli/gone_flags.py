"""The flags, flag values and commands of earlier releases that are gone, with their replacements."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.errors import ConfigError

_CLASSIFIER = "Serve it by SGLang itself, and use --rm-type remote_rm (examples/reward_model)."
_DEPLOY = "examples/deploy/compress.py writes what a run with rounded weights deployed."
_FIRST_OPERATOR = "onpolicy explain names the first operator that differs, without it."
_NAMES = "Leave it out: each run with adapters starts servers of its own."

GONE: dict[str, str] = {
    "--activations": _DEPLOY,
    "--align": "--true-on-policy-mode aligns all kinds of operators.",
    "--attribution": _FIRST_OPERATOR,
    "--lora-dora": "Leave it out: adapters are two factors without magnitudes.",
    "--lora-name": _NAMES,
    "--lora-names": _NAMES,
    "--orders": _FIRST_OPERATOR,
    "--quantised": _DEPLOY,
    "--reward-api-key": _CLASSIFIER,
    "--reward-checkpoint": _CLASSIFIER,
    "--reward-input": _CLASSIFIER,
    "--reward-num-engines": _CLASSIFIER,
    "--reward-server-url": _CLASSIFIER,
    "--rm-type model": _CLASSIFIER,
    "--rollout-activation-format int8": "Use --rollout-activation-format fp8_e4m3.",
    "--rollout-kv-format": "Leave it out: the cache is in --dtype.",
    "--rollout-lora": "Leave it out: stock servers get adapters merged into their weights.",
    "--rollout-pack-weights": "Leave it out: servers keep weights in --dtype, with the same bits.",
    "--rollout-weight-format int3_group128": "Use --rollout-weight-format int3 or int4_group128.",
    "--rollout-weight-format mxfp4": "Use --rollout-weight-format int4_group128.",
    "--rollout-weight-format nvfp4": "Use --rollout-weight-format int4_group128.",
    "--train-pack-weights": "Leave it out: the base of adapters is rounded and kept in --dtype.",
}
"""The advice for a `--flag`, a `--flag value`, or a command's name that is gone."""


def require_not_gone(arguments: Sequence[str]) -> None:
    """Raise ConfigError for the first flag, or value of a flag, that is gone."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-").replace("--no-", "--", 1)
        with_value = f"{flag} {value if equals else following}"
        for gone in (flag, with_value):
            if gone in GONE:
                raise ConfigError(f"{gone}: was removed from onpolicy. {GONE[gone]}")
