"""Addresses of servers, as far as they can be judged without asking the network."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import ConfigError

LAST_PORT = 65535

FORM = "Give http://HOST:PORT, as `onpolicy serve` prints it."


def validate(engine: EngineConfig) -> None:
    """Raise ConfigError for ports beyond the last one, and for URLs that name no server."""
    require_ports(engine.rollout_base_port, engine.rollout_num_engines)
    require_urls(engine.rollout_server_url)


def require_ports(port: int, servers: int) -> None:
    """Raise ConfigError if the last of some servers would listen beyond the last port."""
    if port and port + servers - 1 > LAST_PORT:
        raise ConfigError(
            f"--rollout-base-port={port}: the last of --rollout-num-engines {servers} ports would be "
            f"{port + servers - 1}, beyond {LAST_PORT}. Give a smaller port, or leave the flag out."
        )


def require_urls(urls: Sequence[str]) -> None:
    """Raise ConfigError for URLs that name no server, or one server twice."""
    seen: set[str] = set()
    for url in urls:
        if rule := _broken_rule(url):
            raise ConfigError(f"--rollout-server-url={url}: {rule}. {FORM}")
        if url.rstrip("/") in seen:
            raise ConfigError(
                f"--rollout-server-url={url}: given twice, and a server is used once. Leave one out."
            )
        seen.add(url.rstrip("/"))


def _broken_rule(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return "does not begin with http:// or https://"
    if not parts.hostname or port == 0:
        return "names no host" if not parts.hostname else "has the port 0, which no server has"
    if parts.query or parts.fragment or parts.username or any(c.isspace() for c in url):
        return "holds more than a scheme, a host, a port and a path"
    return None
