"""The check that the other hosts of a cluster see a directory of this host."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from onpolicy.cluster.hosts import Host
from onpolicy.cluster.session import alive_hosts, told_by
from onpolicy.errors import ConfigError
from onpolicy.rollout.server import EngineServer


def require_shared_by_servers(flag: str, directory: Path, servers: Sequence[EngineServer]) -> None:
    """Check the hosts of these servers with `require_shared`."""
    taken = {server.spec.node for server in servers} - {""}
    if taken:
        require_shared(flag, directory, [host for host in alive_hosts() if host.name in taken])


def require_shared(flag: str, directory: Path, hosts: Sequence[Host]) -> None:
    """Raise ConfigError for the first host that does not see this `directory`, named by `flag`."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="seen_by_") as file:
        mark = Path(file.name)
        seen = told_by(hosts, lambda: mark.exists(), f"whether {directory} is there")
    for host, is_seen in seen.items():
        if not is_seen:
            raise ConfigError(
                f"{flag}: {host} does not see {directory}, and a server there needs it. Give a "
                "directory of a file system that all hosts share."
            )
