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
    begin_with(config)
    return with_checkpoints(config)


_CHECKPOINTS = (
    "hf_checkpoint", "ref_checkpoint", "critic_load", "teacher_checkpoint", "checkpoint",
)  # fmt: skip
"""Flags that take a checkpoint of the hub by its name."""


def with_checkpoints(config: Config) -> Config:
    """Return a configuration with the local path of each checkpoint that is named as on the hub."""
    values = flag_values(config)
    named = {name: values[name] for name in _CHECKPOINTS if values.get(name)}
    paths = {
        name: model_path(value, spelled(name))
        if isinstance(value, str)
        else tuple(model_path(each, spelled(name)) for each in value)
        for name, value in named.items()
    }
    return with_flags(config, paths)


def begin_with(config: Any) -> None:
    """Start to log; raise ConfigError if its logs or its result could not be written."""
    written = getattr(config, "output", config)
    with ExitStack() as tried:  # a result may be written beside the logs
        for name in ("run_dir", "save", "save_hf"):
            if directory := getattr(written, name, ""):
                tried.enter_context(tried_directory(spelled(name), directory))
        for name in ("json", "html"):
            if file := getattr(config, name, ""):
                require_writable(f"--{name}", file)
    configure_logging()
    logger.info("loading PyTorch and transformers")


def put_out(result: dict[str, Any], json_file: str) -> None:
    """Print the result as JSON, and write it into the file if one is given."""
    text = json.dumps(finite(result), indent=2, allow_nan=False)
    print(text)
    if json_file:
        write_output("--json", json_file, text + "\n")
