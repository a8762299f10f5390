"""`onpolicy explain`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack

from onpolicy.cli.parse import parse
from onpolicy.cli.verify import validate
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.console import configure_logging
from onpolicy.outputs.destinations import require_writable, write_output

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Record both engines, say where they part, and by the exit code whether they do."""
    config = parse(ExplainConfig, argv, "onpolicy explain")
    _validate(config)
    configure_logging()
    logger.info("loading PyTorch and transformers")

    from onpolicy.explain.attribution import attribute, attribution_text
    from onpolicy.explain.inputs import with_case
    from onpolicy.explain.microscope import explain
    from onpolicy.explain.text import told
    from onpolicy.report.explanation import render, render_attribution
    from onpolicy.run.commands.verify_inputs import check_inputs
    from onpolicy.run.engines import EnginePair
    from onpolicy.run.launch.cluster_engines import MakeEngines, on_cluster
    from onpolicy.run.launch.lengths import fit_verify

    config = fit_verify(with_case(config))
    train_config, contract = check_inputs(config)
    with ExitStack() as stack:
        make_engines: MakeEngines = EnginePair
        if config.cluster.num_ranks > 1 or config.cluster.ray_address:
            make_engines = stack.enter_context(on_cluster(train_config, contract))
        result = (attribute if config.attribution else explain)(config, make_engines)
    if config.attribution:
        text = attribution_text(result["rows"], result["by"])
        page, differ = render_attribution, result["rows"][0]["num_mismatched_tokens"]
    else:
        text, page, differ = told(result), render, result["num_mismatched_tokens"]
    print(text)
    if config.json:
        write_output("--json", config.json, json.dumps(result, indent=2) + "\n")
    if config.html:
        write_output("--html", config.html, page(result, text))
    return 1 if differ else 0


def _validate(config: ExplainConfig) -> None:
    """Raise ConfigError for the first value that breaks a rule."""
    validate(config)
    if config.attribution:
        _require_all_contracts(config)
    if config.html:
        require_writable("--html", config.html)
    if config.servers.rollout_server_url:
        raise ConfigError(
            f"--rollout-server-url={' '.join(config.servers.rollout_server_url)}: the server records "
            "what it computes, so it is started by this command. Leave the flag out."
        )


def _require_all_contracts(config: ExplainConfig) -> None:
    """--attribution goes through contracts from stock to aligned, some of them aligned in part."""
    degree = tensor_parallel_size(config.sglang_args)
    own = "it has contracts and prompts of its own"
    rows = (
        (f"--align={config.operators.align}", config.operators.align, own),
        ("--no-true-on-policy-mode", not config.true_on_policy_mode, own),
        (f"--case={config.case}", config.case, own),
        (f"--train-backend={config.train_backend}", config.train_backend != "fsdp",
         "only the modules of fsdp can be aligned in part"),
        (f"--sglang-tp-size={degree}", degree > 1,
         "only an engine of one rank can be aligned in part"),
    )  # fmt: skip
    for flag, is_given, rule in rows:
        if is_given:
            raise ConfigError(f"{flag} with --attribution: {rule}. Leave one of the two out.")
