"""The user's own functions, named by dotted path or by file."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from onpolicy.errors import ConfigError, in_one_line

FORMS = "Give package.module.function or path/to/file.py:function."


def load_function(path: str, flag: str) -> Callable[..., Any]:
    """Return the function at `package.module.function` or `path/to/file.py:function`. Modules are
    also searched in the current directory, after all other places; a file can import modules beside
    it. Raises a ConfigError that names `flag`, also for any error in the import of the module."""
    file, colon, name = path.rpartition(":")
    if not colon:
        file, _, name = path.rpartition(".")
    if not file or not name or (colon and not file.endswith(".py")) or path.endswith(".py"):
        raise ConfigError(f"{flag}={path}: names no function. {FORMS}")
    module = _import(lambda: _load_file(Path(file)) if colon else _load_module(file), path, flag)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        place = getattr(module, "__file__", file)
        raise ConfigError(f"{flag}={path}: {place} has no {name!r}. {FORMS}")
    if not callable(function):
        raise ConfigError(f"{flag}={path}: is a {type(function).__name__}, not a function. {FORMS}")
    return function


def source_of(path: str) -> Path | None:
    """Return the file of the function that `load_function` finds, or None if it is unknown."""
    file, colon, _ = path.rpartition(":")
    if colon:
        return found if (found := Path(file)).is_file() else None
    module = sys.modules.get(path.rpartition(".")[0])
    place = getattr(module, "__file__", None)
    return Path(place) if place and Path(place).is_file() else None


def _import(load: Callable[[], ModuleType], path: str, flag: str) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # the module is user code
        raise ConfigError(
            f"{flag}={path}: cannot be imported: {describe(error)}. {FORMS} Modules are looked for "
            "among the installed ones, in PYTHONPATH and in the current directory."
        ) from error


def _load_module(name: str) -> ModuleType:
    _search(os.getcwd())
    return importlib.import_module(name)


def _load_file(file: Path) -> ModuleType:
    _search(str(file.resolve().parent))
    # A unique name: a file called math.py must not replace the module math.
    name = f"onpolicy_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _search(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)


def describe(error: BaseException) -> str:
    """Return an error of the user's code in one line, with the place where it was raised."""
    try:
        text = f"{type(error).__name__}: {in_one_line(error)}"
    except Exception:  # its own __str__ raises
        text = type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_the_users(f.filename)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return text if isinstance(error, SyntaxError) else text + place


def _is_the_users(file: str) -> bool:
    machinery = ("<frozen", str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent))
    return not file.startswith(machinery)
