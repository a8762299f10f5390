"""The command `onpolicy report RUN...`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onpolicy.cli.episodes import EpisodesConfig
from onpolicy.cli.parse import parse
from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import require_writable, write_output


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write one HTML page with the curves of several runs on the same axes.

    Runs whose configuration differs only in the seed share a colour and get a bold median."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Run directories of `onpolicy train`, or their metrics.jsonl files. At least one is required."""

    output: str = "report.html"
    """File to write. The page works offline."""

    episodes: bool = False
    """Also write a page with the last episodes of each run beside it, and link to it."""


def main(argv: Sequence[str]) -> int:
    """Read the runs, and write the page."""
    config = parse(ReportConfig, argv, "onpolicy report")
    if not config.runs:
        raise ConfigError("RUN is missing: a report needs at least one. Give a run's directory.")

    require_writable("--output", config.output)

    from onpolicy.report.episode_page import write_pages
    from onpolicy.report.page import read_runs, render

    runs = read_runs(config.runs)
    links = {}
    if config.episodes:
        links = write_pages(runs, Path(config.output), EpisodesConfig.rollouts)
    write_output("--output", config.output, render(runs, links))
    print(f"{config.output}: {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0
