"""Flags, values of flags and commands that earlier releases had, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.errors import ConfigError

_NAMES = "Leave it out: each run with adapters starts servers of its own."

_CLASSIFIER = "Serve it by SGLang itself, and use --rm-type remote_rm (examples/reward_model)."

GONE: dict[str, str] = {
    "--rm-type model": _CLASSIFIER,
    "--reward-checkpoint": _CLASSIFIER,
    "--reward-num-engines": _CLASSIFIER,
    "--reward-server-url": _CLASSIFIER,
    "--reward-api-key": _CLASSIFIER,
    "--reward-input": _CLASSIFIER,
    "--lora-dora": "Leave it out: adapters are two factors without magnitudes.",
    "--lora-name": _NAMES,
    "--lora-names": _NAMES,
    "--rollout-lora": "Leave it out: stock servers get adapters merged into their weights.",
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
