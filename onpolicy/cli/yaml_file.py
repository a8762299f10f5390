"""The YAML file of --custom-config-path, turned into arguments of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onpolicy.cli.gone_flags import require_not_gone
from onpolicy.config.flags import spelled
from onpolicy.config.strict_yaml import broken_kind, read_mapping, require_known
from onpolicy.errors import ConfigError

CONFIG_KEY = "custom_config_path"
SGLANG = "sglang_"


def read_arguments(path: str, kinds: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the arguments of the file, and its arguments for SGLang; `kinds` holds the type of every
    flag.

    Raises ConfigError for a file, a key or a value that is no part of a configuration.
    """
    ours: list[str] = []
    sglang: list[str] = []
    name = f"{spelled(CONFIG_KEY)}={path}"
    for key, value in read_mapping(path, name).items():
        if isinstance(key, str) and key.startswith(SGLANG):
            sglang += _sglang_argument(key, value, name)
            continue
        if key == CONFIG_KEY:
            raise ConfigError(f"{name}: {key} does nothing inside the file. Leave it out.")
        require_not_gone([f"{spelled(str(key))}={value}"])
        require_known(key, kinds, name)
        if rule := broken_kind(value, kinds[key]):
            raise ConfigError(f"{name}: {key}={value!r}: {rule}.")
        ours += as_argument(key, value)
    return ours, sglang


def as_argument(key: str, value: object) -> list[str]:
    """Return a flag, named with _ for -, and its value as arguments of the command line."""
    flag = spelled(key)
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _sglang_argument(key: str, value: object, name: str) -> list[str]:
    """Return a flag for SGLang, which alone knows its type: true sets a switch, false leaves it out."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        raise ConfigError(
            f"{name}: {key}={value!r}: must be text, a number, true or a list of them."
        )
    flag = spelled(key.removeprefix(SGLANG))
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, items)]
