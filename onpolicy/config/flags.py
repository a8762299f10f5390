"""A configuration seen as its flags: types, defaults and values, without the groups they are in."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

SGLANG_ARGS = "sglang_args"
"""A field that is no flag: what --sglang-* collected."""


def flag_types(config_class: type) -> dict[str, Any]:
    """The type of every flag, by its name with _ for -."""
    types: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config_class).items():
        is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        types |= flag_types(kind) if is_group else {name: kind}
    types.pop(SGLANG_ARGS, None)
    return types


def flag_values(config: Any) -> dict[str, Any]:
    """The value of every flag."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        values |= flag_values(value) if dataclasses.is_dataclass(value) else {item.name: value}
    values.pop(SGLANG_ARGS, None)
    return values


def flag_defaults(config_class: type) -> dict[str, Any]:
    """The default of every flag that has one."""
    defaults: dict[str, Any] = {}
    for item in dataclasses.fields(config_class):
        if item.default_factory is not dataclasses.MISSING:
            defaults |= flag_values(item.default_factory())
        elif item.default is not dataclasses.MISSING:
            defaults[item.name] = item.default
    defaults.pop(SGLANG_ARGS, None)
    return defaults


def spelled(name: str) -> str:
    """The flag as it is given: `rollout_host` -> `--rollout-host`."""
    return f"--{name.replace('_', '-')}"
