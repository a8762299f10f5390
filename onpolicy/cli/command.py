"""The steps that commands share: before their work, and for the output of a result."""

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.flags import flag_values, spelled, with_flags
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.destinations import require_writable, tried_directory, write_output
from onpolicy.system.hub import data_name, model_path
from onpolicy.system.json_values import finite

logger = logging.getLogger(__name__)

Config = TypeVar("Config")


def begin(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Return the checked configuration, before heavy imports. Raises ConfigError."""
    config = parse(config_class, argv, prog)
    validate(config)
    return begin_with(config)


def with_commits(config: Config) -> Config:
    """Return a configuration whose names of the hub are those of commits: checkpoints as local paths,
    and rows as OWNER/NAME@COMMIT:SPLIT."""
    values, told = flag_values(config), dict[str, Any]()
    for flag, place in _NAMED.items():
        if given := values.get(flag):
            names = [given] if isinstance(given, str) else given
            found = tuple(place(name, spelled(flag)) for name in names)
            told[flag] = found[0] if isinstance(given, str) else found
    return with_flags(config, told)


def _checkpoint(value: str, flag: str) -> str:
    """Return a checkpoint, or a teacher's name with `=` and its checkpoint."""
    name, equals, source = value.partition("=")
    if not equals or "/" in name or Path(value).exists():
        return model_path(value, flag)
    return f"{name}={model_path(source, flag)}"


_NAMED = {
    **dict.fromkeys(("hf_checkpoint", "ref_checkpoint", "critic_load"), _checkpoint),
    **dict.fromkeys(("prompt_data", "eval_prompt_data"), data_name),
    "teacher_checkpoint": _checkpoint,
}
"""Flags that take names of the hub."""


def begin_with(config: Config) -> Config:
    """Start to log, and return the configuration with names of the hub at their commits. Raises
    ConfigError if logs or the result could not be written, or the hub lacks a name."""
    written = getattr(config, "output", config)
    with ExitStack() as tried:  # a result may be written beside the logs
        for name in ("run_dir", "save", "save_hf"):
            if directory := getattr(written, name, ""):
                tried.enter_context(tried_directory(spelled(name), directory))
        for name in ("json", "html"):
            if file := getattr(config, name, ""):
                require_writable(f"--{name}", file)
    configure_logging()
    config = with_commits(config)
    logger.info("loading PyTorch and transformers")
    return config


def put_out(result: dict[str, Any], json_file: str) -> None:
    """Print the result as JSON, and write it into the file if one is given."""
    text = json.dumps(finite(result), indent=2, allow_nan=False)
    print(text)
    if json_file:
        write_output("--json", json_file, text + "\n")
