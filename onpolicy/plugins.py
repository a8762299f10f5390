"""Functions of the user's own, named by dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from onpolicy.errors import ConfigError


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """The function at `package.module.function`. Raises ConfigError that names `flag`."""
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{flag}={path}: cannot be imported ({error}). Give package.module.function, and make "
            "sure that the package is installed or its directory is in PYTHONPATH."
        ) from error
    if not callable(function):
        raise ConfigError(f"{flag}={path}: is a {type(function).__name__}, not a function.")
    return function
