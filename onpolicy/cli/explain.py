"""`onpolicy explain`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.cli.verify import validate
from onpolicy.config.groups import ClusterConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.places import require_writable, write_output

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Record both engines, say where they part, and by the exit code whether they do."""
    config = parse(ExplainConfig, argv, "onpolicy explain")
    _validate(config)
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.explain.text import told
    from onpolicy.report.explanation import render
    from onpolicy.run.explain import explain
    from onpolicy.run.explain_inputs import with_case
    from onpolicy.run.verify_inputs import check_inputs
    from onpolicy.train import distributed

    config = with_case(config)
    check_inputs(config)
    distributed.init_process_group()
    result = explain(config)
    text = told(result)
    print(text)
    if config.json:
        write_output("--json", config.json, json.dumps(result, indent=2) + "\n")
    if config.html:
        write_output("--html", config.html, render(result, text))
    return 1 if result["num_mismatched_tokens"] else 0


def _validate(config: ExplainConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    validate(config)
    if config.html:
        require_writable("--html", config.html)
    if config.servers.rollout_server_url:
        raise ConfigError(
            f"--rollout-server-url={' '.join(config.servers.rollout_server_url)}: the server records "
            "what it computes, so it is started by this command. Leave the flag out."
        )
    if config.cluster != ClusterConfig():
        raise ConfigError(
            "--ray-address, --actor-num-*: the trainer is recorded in this process, and is one rank. "
            "Leave them out."
        )
    if (degree := tensor_parallel_size(config.sglang_args)) > 1:
        raise ConfigError(
            f"--sglang-tp-size={degree}: the ranks of a server hold parts of rows, which are not put "
            "together here. Leave the flag out; `onpolicy verify` takes it."
        )
    if config.train_backend != "fsdp":
        raise ConfigError(
            f"--train-backend={config.train_backend}: only the modules of fsdp are recorded. Leave the "
            "flag out; `onpolicy verify` takes it."
        )
