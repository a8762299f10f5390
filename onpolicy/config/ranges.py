"""Every value within what stands beside its field, for all commands: a flag means the same in each."""

from __future__ import annotations

from typing import Any

from fallback_correction.ranges import FieldError, broken_rule, require_order
from onpolicy.config.flags import Flag, flags_of, refusal, spelled
from onpolicy.errors import ConfigError


def require_ranges(config: Any) -> None:
    """Raise ConfigError for the first number, or text, that is beyond what its flag can take."""
    flags = flags_of(type(config))
    for flag in flags:
        value = flag.value(config)
        for item in value if isinstance(value, tuple) else (value,):
            if rule := _broken_text_rule(item) or broken_rule(item, flag.notes):
                shown = "..." if flag.name == "rollout_api_key" else _short(item)
                raise ConfigError(f"{spelled(flag.name)}={shown}: {rule}")
    for flag in flags:
        _require_order(flag, config)


def _broken_text_rule(value: object) -> str | None:
    has_nul = isinstance(value, str) and "\0" in value
    return "holds a NUL character. Leave it out." if has_nul else None


def _require_order(flag: Flag, config: Any) -> None:
    try:
        require_order(flag.record(config), flag.path[-1], flag.notes)
    except FieldError as error:
        raise ConfigError(refusal(flag, error)) from error


def _short(value: object) -> str:
    """Numbers of many digits by their ends."""
    text = str(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:12]}...{text[-12:]} ({len(text)} characters)"
