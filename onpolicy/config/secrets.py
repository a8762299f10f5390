"""Secret values: API keys and passwords, ours and SGLang's."""

from collections.abc import Sequence
from pathlib import Path

from onpolicy.errors import ConfigError

HIDDEN = "..."

ADMIN_KEY = "--admin-api-key"
"""SGLang's flag for a key of control calls."""


def reveal(flag: str, value: str) -> str:
    """Return the secret that a flag was given: the value itself, or the content of the file after
    an @. Raises ConfigError if the file cannot be read or is empty."""
    if not value.startswith("@"):
        return value
    try:
        secret = Path(value[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"{flag}={value}: the file with the secret cannot be read ({reason})."
        ) from error
    if not secret:
        raise ConfigError(f"{flag}={value}: the file with the secret is empty. Write it there.")
    return secret


def is_key(name: str) -> bool:
    """Return whether a flag of ours, by its name with _, is an API key."""
    return name.endswith("_api_key")


def is_secret(argument: str) -> bool:
    """Return whether a flag's value is secret, by its name: --admin-api-key, --x-password=y."""
    name = argument.split("=")[0]
    return name.startswith("--") and name.endswith(("key", "password", "secret"))


def split(sglang_args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate secrets from the other arguments: (the others, secrets by flag)."""
    others: list[str] = []
    secrets: dict[str, str] = {}
    arguments = iter(sglang_args)
    for argument in arguments:
        if is_secret(argument):
            flag, equals, value = argument.partition("=")
            secrets[flag] = value if equals else next(arguments, "")
        else:
            others.append(argument)
    return others, secrets


def control_key(sglang_args: Sequence[str], api_key: str) -> str:
    """Return the key of control calls: the value of SGLang's own flag, else `api_key`."""
    given = split(sglang_args)[1].get(ADMIN_KEY)
    return reveal(ADMIN_KEY, given) if given else api_key


def hide(sglang_args: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments with `...` for secrets, for display and records."""
    others, secrets = split(sglang_args)
    return (*others, *(f"{flag}={HIDDEN}" for flag in secrets))
