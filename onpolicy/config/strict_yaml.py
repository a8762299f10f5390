"""The strict reading of YAML files with settings: each value must have its setting's type.

So `shuffle: "no"` or `save:` (null) is an error that names file and key, and not taken for a text.
"""

import difflib
import types
import typing
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any, Literal

import yaml

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.system.files import read_text


def read_mapping(path: str, name: str) -> dict[Any, Any]:
    """Return the mapping in a file, empty for an empty file; `name` stands for the file in
    messages. Raises ConfigError for a file that is no mapping, or has a key twice."""
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
    return require_mapping({} if values is None else values, name, "flag names to values")


def require_mapping(value: object, name: str, of: str) -> dict[Any, Any]:
    """Return the value if it is a mapping. Raises ConfigError if it is not."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: must be a mapping of {of}.")
    return value


class _Loader(yaml.SafeLoader):
    """A loader that refuses a duplicate key, of which YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def require_known(key: object, keys: Collection[str], name: str) -> None:
    """Raise ConfigError, with the nearest name, for a key that is none of `keys`."""
    if key not in keys:
        nearest = difflib.get_close_matches(str(key).replace("-", "_"), keys, 1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"{name}: unknown key {key!r}.{hint}")


def broken_kind(value: object, kind: Any) -> str | None:
    """Return the rule that `value` breaks as a setting of type `kind`, or None if it fits."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return broken_kind(value, kind)
    if typing.get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return next((rule for item in items if (rule := broken_kind(item, arguments[0]))), None)
    if typing.get_origin(kind) is Literal:
        hint = "; put it in quotes, since YAML takes on and off for true and false"
        words = f"must be one of {', '.join(map(repr, arguments))}"
        return None if value in arguments else words + hint * isinstance(value, bool)
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false, without quotes"
    if kind is str:
        return None if isinstance(value, str) else "must be text; put it in quotes"
    return None if _is_number(value, kind) else f"must be a {_NUMBERS[kind]}"


_NUMBERS = {int: "whole number", float: "number"}


def _is_number(value: object, kind: type) -> bool:
    """Return whether a value is a number, or its text: YAML reads 1e-6, without a dot, as text."""
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
