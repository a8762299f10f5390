"""The command `onpolicy serve`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from onpolicy.cli.command import begin
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.outputs.lock import locked


def main(argv: Sequence[str]) -> int:
    """Start the servers, print how to use them, and watch them until interrupted."""
    config = begin(ServeConfig, argv, "onpolicy serve")
    with locked(Path(config.run_dir), "--run-dir"):
        _serve(config)
    return 0


def _serve(config: ServeConfig) -> None:
    from onpolicy.cluster.placement import placement_of_servers
    from onpolicy.run.commands.served_engines import checked_spec, needs_of_servers, serve
    from onpolicy.run.launch.cluster_engines import places_on_cluster

    spec = checked_spec(config)
    host = config.server.rollout_host
    place = partial(placement_of_servers, config.engines, spec.tp_size, host, spec.contract)
    needs = needs_of_servers(config, spec)
    with places_on_cluster(config.cluster, place, config.server.cpu_threads, needs) as places:
        serve(config, spec, places)
