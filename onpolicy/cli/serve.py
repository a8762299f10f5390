"""`onpolicy serve`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.config import sglang_flags
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import ServeConfig
from onpolicy.config.validate import (
    require_key_for_host,
    require_mode_for_operators,
    require_secrets,
)
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.places import require_directory

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Start the server, print how to use it, and keep it until interrupted."""
    config = parse(ServeConfig, argv, "onpolicy serve")
    _validate(config)
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.run.serve import checked_spec, serve

    serve(config, checked_spec(config))


def _validate(config: ServeConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    server = config.server
    require_ranges(config)
    sglang_flags.validate(config.sglang_args, aligned=config.true_on_policy_mode)
    require_key_for_host(server.rollout_host, server.rollout_api_key)
    require_secrets(server.rollout_api_key, config.sglang_args)
    require_mode_for_operators(config.operators.operators, aligned=config.true_on_policy_mode)
    config.count_row_parallel_blocks()
    require_directory("--run-dir", config.run_dir)
