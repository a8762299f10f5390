"""`onpolicy report RUN...`."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.cli.parse import parse
from onpolicy.config.tools import ReportConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import require_writable, write_output


def main(argv: Sequence[str]) -> int:
    """Read the runs and write the page."""
    config = parse(ReportConfig, argv, "onpolicy report")
    if not config.runs:
        raise ConfigError("RUN is missing: a report needs at least one. Give a run's directory.")

    require_writable("--output", config.output)

    from onpolicy.report.page import render
    from onpolicy.report.runs import read_runs

    runs = read_runs(config.runs)
    write_output("--output", config.output, render(runs))
    print(f"{config.output}: {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0
