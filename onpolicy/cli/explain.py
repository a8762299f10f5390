"""The command `onpolicy explain`."""

import json
from collections.abc import Sequence
from contextlib import ExitStack

from onpolicy.cli.command import begin
from onpolicy.config import validate
from onpolicy.config.tool_flags import ExplainConfig
from onpolicy.errors import visible
from onpolicy.outputs.destinations import write_output
from onpolicy.system.json_values import finite


def main(argv: Sequence[str]) -> int:
    """Record both engines, print where they differ, and return 1 if they do."""
    config = begin(ExplainConfig, argv, "onpolicy explain")

    from onpolicy.explain.explain_inputs import with_case
    from onpolicy.explain.findings import render, told
    from onpolicy.explain.microscope import explain
    from onpolicy.run.commands.verification import check_inputs
    from onpolicy.run.engines import EnginePair
    from onpolicy.run.launch.cluster_engines import MakeEngines, on_cluster
    from onpolicy.run.launch.input_checks import fit_verify

    config = fit_verify(with_case(config))
    validate(config)  # a case has a contract of its own
    train_config, contract = check_inputs(config)
    with ExitStack() as stack:
        make_engines: MakeEngines = EnginePair
        if config.cluster.num_ranks > 1 or config.cluster.ray_address:
            cluster = stack.enter_context(on_cluster(train_config, contract))
            make_engines = cluster.make_engines
        result = explain(config, make_engines)
    text = told(result)
    print(visible(text))
    if config.json:
        text_of_result = json.dumps(finite(result), indent=2, allow_nan=False)
        write_output("--json", config.json, text_of_result + "\n")
    if config.html:
        write_output("--html", config.html, render(result, text))
    return 1 if result["num_mismatched_tokens"] else 0
