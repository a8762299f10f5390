"""The one version of Megatron-core whose internals the modules beside this one are written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from onpolicy.errors import ConfigError

MEGATRON_CORE = "0.16.1"

_REMEDY = (
    f"Install it without its dependencies, which onpolicy brings: pip install --no-deps "
    f"megatron-core=={MEGATRON_CORE}. Or use --train-backend fsdp."
)


def require_megatron() -> None:
    """Raise ConfigError if megatron-core is missing or another version."""
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--train-backend megatron: megatron-core is not installed. {_REMEDY}"
        ) from error
    if installed != MEGATRON_CORE:
        raise ConfigError(
            f"--train-backend megatron: megatron-core=={installed} is installed, and this version of "
            f"onpolicy replaces internals of {MEGATRON_CORE}. {_REMEDY}"
        )
