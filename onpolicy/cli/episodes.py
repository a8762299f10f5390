"""The command `onpolicy episodes RUN`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from fallback_correction.ranges import ReadBy, at_least, at_most
from onpolicy.cli.parse import parse
from onpolicy.config.kinds import LAST_PORT, Count
from onpolicy.config.rules import require_ranges
from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import require_writable, write_output


@dataclass(frozen=True, kw_only=True)
class EpisodesConfig:
    """Write one HTML page with the episodes of a run, or serve it while the run goes on.

    The page shows turns, tool calls, and tokens coloured by probability, advantage and weight."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """Run directory of `onpolicy train`."""

    output: str = "episodes.html"
    """File to write. The page works offline."""

    port: Annotated[int | None, at_least(0), at_most(LAST_PORT)] = None
    """Serve the page on this port of this host instead, as the run goes on; 0 takes a free port. The
    printed URL holds a token and is for you alone."""

    page_host: Annotated[tuple[str, ...], ReadBy("--port", lambda run: run.port is not None)] = ()
    """Further host names under which the page may be requested, such as a proxy's."""

    rollouts: Count = 20
    """Number of last rollouts and evaluations with samples to show."""


def main(argv: Sequence[str]) -> int:
    """Read the samples, and write or serve the page."""
    config = parse(EpisodesConfig, argv, "onpolicy episodes")
    require_ranges(config)
    if not config.run:
        raise ConfigError("RUN is missing. Give a run's directory.")

    from onpolicy.report.episode_page import make_server, read_episodes, render

    read = partial(read_episodes, config.run, config.rollouts)
    if config.port is not None:
        read()
        with make_server(config.port, read, render, config.page_host) as server:
            print(server.url, flush=True)
            server.serve_forever()
        return 0
    require_writable("--output", config.output)
    data = read()
    write_output("--output", config.output, render(data))
    print(f"{config.output}: {len(data['episodes'])} episodes")
    return 0
