"""`onpolicy report RUN...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onpolicy.config import parse
from onpolicy.config.tools import ReportConfig
from onpolicy.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Read the runs and write the page."""
    config = parse(ReportConfig, argv, "onpolicy report")
    if not config.runs:
        raise ConfigError("RUN is missing: a report needs at least one. Give a run's directory.")

    from onpolicy.outputs.report import render
    from onpolicy.outputs.report_runs import read_runs

    runs = read_runs(config.runs)
    _write(config.output, render(runs))
    print(f"{config.output}: {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0


def _write(output: str, page: str) -> None:
    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output={output}: cannot be written ({error.strerror}). Give another path."
        ) from error
