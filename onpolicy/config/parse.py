"""From an argument list and a YAML file to a typed configuration. The command line wins."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from onpolicy.config import sglang_flags
from onpolicy.errors import ConfigError

Config = TypeVar("Config")
CONFIG_FLAG = "--custom-config-path"


def parse(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Parse flags of `config_class`, a dataclass of flags or of groups of flags.

    Raises ConfigError for a bad YAML file; unknown flags end the process with the nearest name.
    """
    rest, sglang_args = sglang_flags.split(argv)
    flags = _file_flags(config_class, rest)
    config = tyro.cli(config_class, args=[*flags, *rest], prog=prog)
    file_sglang = sglang_flags.split(_yaml_arguments(rest, only_sglang=True))[1]
    if file_sglang or sglang_args:
        config = dataclasses.replace(config, sglang_args=(*file_sglang, *sglang_args))  # type: ignore[type-var]
    return config


def _file_flags(config_class: type, argv: Sequence[str]) -> list[str]:
    """The YAML file's values as flags, to stand before the command line's."""
    keys = known_keys(config_class)
    for key in _yaml_values(argv):
        if key not in keys and not key.startswith("sglang_"):
            nearest = difflib.get_close_matches(key, keys, 1)
            hint = f" Did you mean {nearest[0]}?" if nearest else ""
            raise ConfigError(f"{_yaml_path(argv)}: unknown key {key!r}.{hint}")
    return _yaml_arguments(argv, only_sglang=False)


def known_keys(config_class: type) -> list[str]:
    """The flags of a configuration class, as YAML keys."""
    keys: list[str] = []
    for item in dataclasses.fields(config_class):
        default = (
            item.default_factory() if item.default_factory is not dataclasses.MISSING else None
        )
        if dataclasses.is_dataclass(default):
            keys += [inner.name for inner in dataclasses.fields(default)]
        elif item.name != "sglang_args":
            keys.append(item.name)
    return keys


def _yaml_path(argv: Sequence[str]) -> str | None:
    for position, arg in enumerate(argv):
        if arg == CONFIG_FLAG and position + 1 < len(argv):
            return argv[position + 1]
        if arg.startswith(CONFIG_FLAG + "="):
            return arg.split("=", 1)[1]
    return None


def _yaml_values(argv: Sequence[str]) -> dict[str, Any]:
    path = _yaml_path(argv)
    if not path:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG}={path}: cannot be read ({error.strerror}).") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{CONFIG_FLAG}={path}: not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG_FLAG}={path}: must be a mapping of flag names to values.")
    return values


def _yaml_arguments(argv: Sequence[str], only_sglang: bool) -> list[str]:
    arguments: list[str] = []
    for key, value in _yaml_values(argv).items():
        if key.startswith("sglang_") != only_sglang:
            continue
        name = key.replace("_", "-")
        if isinstance(value, bool) and not only_sglang:
            arguments.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, bool):
            arguments += [f"--{name}"] if value else []
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *map(str, values)]
    return arguments
