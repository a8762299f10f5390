"""The command `onpolicy verify`."""

from collections.abc import Sequence

from onpolicy.cli.command import begin, put_out
from onpolicy.config.tool_flags import VerifyConfig


def main(argv: Sequence[str]) -> int:
    """Measure, print the report, and return 1 if the mode's promise does not hold."""
    config = begin(VerifyConfig, argv, "onpolicy verify")

    from onpolicy.run.commands.verification import check_inputs, passes, verify
    from onpolicy.run.launch.cluster_engines import on_cluster
    from onpolicy.run.launch.input_checks import fit_verify

    config = fit_verify(config)
    train_config, contract = check_inputs(config)
    with on_cluster(train_config, contract) as cluster:
        report = verify(config, cluster.make_engines)
    put_out(report, config.json)
    return 0 if passes(report, config) else 1
