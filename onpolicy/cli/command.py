"""The steps that commands share: before their work, and for the output of a result."""

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.flags import flag_values, spelled, with_flags
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.destinations import require_writable, tried_directory, write_output
from onpolicy.system.hub import model_path
from onpolicy.system.json_values import finite

logger = logging.getLogger(__name__)

Config = TypeVar("Config")


def begin(config_class: type[Config], argv: Sequence[str], prog: str) -> Config:
    """Return the checked configuration, before heavy imports. Raises ConfigError."""
    config = parse(config_class, argv, prog)
    validate(config)
    return begin_with(config)


_CHECKPOINTS = ("hf_checkpoint", "ref_checkpoint", "critic_load", "teacher_checkpoint")
"""Flags that take a checkpoint of the hub by its name."""


def with_checkpoints(config: Config) -> Config:
    """Return a configuration with the local path of each checkpoint that is named as on the hub."""
    values = flag_values(config)
    named = {name: values[name] for name in _CHECKPOINTS if values.get(name)}
    paths = {
        name: model_path(value, spelled(name))
        if isinstance(value, str)
        else tuple(_named_path(each, spelled(name)) for each in value)
        for name, value in named.items()
    }
    return with_flags(config, paths)


def _named_path(value: str, flag: str) -> str:
    """Return a checkpoint, or a teacher's name with `=` and its checkpoint."""
    name, equals, source = value.partition("=")
    if not equals or "/" in name:
        return model_path(value, flag)
    return f"{name}={model_path(source, flag)}"


def begin_with(config: Config) -> Config:
    """Start to log, and return the configuration with checkpoints of the hub as local paths. Raises
    ConfigError if logs or the result could not be written, or the hub does not give a checkpoint."""
    written = getattr(config, "output", config)
    with ExitStack() as tried:  # a result may be written beside the logs
        for name in ("run_dir", "save", "save_hf"):
            if directory := getattr(written, name, ""):
                tried.enter_context(tried_directory(spelled(name), directory))
        for name in ("json", "html"):
            if file := getattr(config, name, ""):
                require_writable(f"--{name}", file)
    configure_logging()
    config = with_checkpoints(config)
    logger.info("loading PyTorch and transformers")
    return config


def put_out(result: dict[str, Any], json_file: str) -> None:
    """Print the result as JSON, and write it into the file if one is given."""
    text = json.dumps(finite(result), indent=2, allow_nan=False)
    print(text)
    if json_file:
        write_output("--json", json_file, text + "\n")
