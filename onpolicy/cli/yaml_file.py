"""The YAML file of --custom-config-path: read strictly, and turned into arguments of the command line.

A value must be of its flag's own kind, so that `shuffle: "no"` or `save:` (null) is an error that
names the file and the key, and not a text that a flag happens to take.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from onpolicy.config.flags import spelled
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system.reading import read_text

CONFIG_KEY = "custom_config_path"
SGLANG = "sglang_"


def read_arguments(path: str, kinds: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(arguments, arguments for SGLang) of the file; `kinds` holds the type of every flag.

    Raises ConfigError for a file, a key or a value that is no part of a configuration.
    """
    ours: list[str] = []
    sglang: list[str] = []
    name = f"{spelled(CONFIG_KEY)}={path}"
    for key, value in _read(path, name).items():
        if isinstance(key, str) and key.startswith(SGLANG):
            sglang += _sglang_argument(key, value, name)
            continue
        _require_known(key, list(kinds), name)
        if rule := _broken_rule(value, kinds[key]):
            raise ConfigError(f"{name}: {key}={value!r}: {rule}.")
        ours += as_argument(key, value)
    return ours, sglang


def _read(path: str, name: str) -> dict[Any, Any]:
    text = read_text(Path(path), name)
    try:
        values = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}: not valid YAML: {error.problem}{line}.") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as the 31st of February
        raise ConfigError(f"{name}: not valid YAML: {in_one_line(error)}.") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: must be a mapping of flag names to values.")
    return values


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _require_known(key: object, keys: list[str], name: str) -> None:
    if key == CONFIG_KEY:
        raise ConfigError(f"{name}: {key} does nothing inside the file. Leave it out.")
    if key not in keys:
        nearest = difflib.get_close_matches(str(key).replace("-", "_"), keys, 1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"{name}: unknown key {key!r}.{hint}")


def _broken_rule(value: object, kind: Any) -> str | None:
    """What `value` should be to stand for a flag of type `kind`; None if it is."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _broken_rule(value, kind)
    if typing.get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return next((rule for item in items if (rule := _broken_rule(item, arguments[0]))), None)
    if typing.get_origin(kind) is Literal:
        return None if value in arguments else f"must be one of {', '.join(map(repr, arguments))}"
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false, without quotes"
    if kind is str:
        return None if isinstance(value, str) else "must be text; put it in quotes"
    return None if _is_number(value, kind) else f"must be a {_NUMBERS[kind]}"


_NUMBERS = {int: "whole number", float: "number"}


def _is_number(value: object, kind: type) -> bool:
    """Texts that are numbers count too: YAML takes 1e-6, which has no dot, for one."""
    allowed = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False
    try:
        kind(value)
    except OverflowError:  # an integer beyond all floats: a number, and out of its flag's range
        return True
    except ValueError:
        return False
    return True


def as_argument(key: str, value: object) -> list[str]:
    """A flag by its name with _ for -, and its value, as arguments of the command line."""
    flag = spelled(key)
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _sglang_argument(key: str, value: object, name: str) -> list[str]:
    """A flag of SGLang's, whose kind only SGLang knows: true sets a switch, false leaves it out."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, (str, int, float)) for item in items):
        raise ConfigError(
            f"{name}: {key}={value!r}: must be text, a number, true or a list of them."
        )
    flag = spelled(key.removeprefix(SGLANG))
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, items)]
