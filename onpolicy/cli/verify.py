"""`onpolicy verify`."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.cli.result import put_out, require_places
from onpolicy.config.addresses import require_urls
from onpolicy.config.aligned import require_operators
from onpolicy.config.ranges import require_ranges
from onpolicy.config.tools import VerifyConfig
from onpolicy.config.unread import refuse_unread
from onpolicy.config.validate import (
    require_cluster,
    require_secrets,
    require_servers,
)
from onpolicy.outputs.console import configure_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Measure, print the report, and say by the exit code whether the mode's promise holds."""
    config = parse(VerifyConfig, argv, "onpolicy verify")
    validate(config)
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.run.commands.verify import passes, verify
    from onpolicy.run.commands.verify_inputs import check_inputs
    from onpolicy.run.launch.cluster_engines import on_cluster
    from onpolicy.run.launch.lengths import fit_verify

    config = fit_verify(config)
    train_config, contract = check_inputs(config)
    with on_cluster(train_config, contract) as make_engines:
        report = verify(config, make_engines)
    put_out(report, config.json)
    return 0 if passes(report, config) else 1


def validate(config: VerifyConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    require_ranges(config)
    require_operators(
        config.operators,
        config.sglang_args,
        mode=config.true_on_policy_mode,
        train_backend=config.train_backend,
    )
    require_servers(config.servers, config.weight_sync, config.sglang_args)
    require_urls(config.servers.rollout_server_url)
    require_cluster(config.cluster)
    require_secrets(config.servers.rollout_api_key, config.sglang_args)
    refuse_unread(config)
    require_places(config.run_dir, config.json)
