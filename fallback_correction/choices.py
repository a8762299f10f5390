"""Run-time checks of names against the `Literal` types of this package."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints


def require_choice(name: str, value: object, choices: Any) -> None:
    """Raise ValueError, listing the choices, unless `value` is one of the names of `choices`, a
    Literal."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: unknown. Use one of {', '.join(get_args(choices))}.")


def require_choices(config: object) -> None:
    """Check every field of a dataclass whose type is a Literal by `require_choice`; None passes where
    the type allows it."""
    config_class: Any = type(config)
    for name, hint, choices in _choices_of(config_class):
        value = getattr(config, name)
        if not (value is None and type(None) in get_args(hint)):
            require_choice(name, value, choices)


@cache
def _choices_of(config_class: type) -> tuple[tuple[str, Any, Any], ...]:
    """Return name, type and Literal of each field that has one."""
    return tuple(
        (name, hint, arm)
        for name, hint in get_type_hints(config_class).items()
        for arm in (hint, *get_args(hint))
        if get_origin(arm) is Literal
    )
