"""`onpolicy serve`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from onpolicy.cli.parse import parse
from onpolicy.config.addresses import require_ports
from onpolicy.config.aligned import require_operators
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import ServeConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.config.validate import (
    require_key_for_host,
    require_ray_address,
    require_secrets,
)
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.destinations import require_directory

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Start the servers, print how to use them, and keep them until interrupted."""
    config = parse(ServeConfig, argv, "onpolicy serve")
    _validate(config)
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.run.commands.serve import checked_spec, needs_of_servers, serve
    from onpolicy.run.launch.cluster_engines import places_on_cluster
    from onpolicy.run.launch.host_shares import placement_of_servers

    spec = checked_spec(config)
    host = config.server.rollout_host
    place = partial(placement_of_servers, config.engines, spec.tp_size, host, spec.contract)
    needs = needs_of_servers(config, spec)
    with places_on_cluster(config.cluster, place, config.server.cpu_threads, needs) as places:
        serve(config, spec, places)


def _validate(config: ServeConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    server = config.server
    require_ranges(config)
    require_operators(config.operators, config.sglang_args, mode=config.true_on_policy_mode)
    require_ports(server.rollout_base_port, config.engines.rollout_num_engines)
    require_ray_address(config.cluster)
    require_key_for_host(server.rollout_host, server.rollout_api_key)
    require_secrets(server.rollout_api_key, config.sglang_args)
    config.count_row_parallel_blocks()
    refuse_unread(config)
    require_directory("--run-dir", config.run_dir)
