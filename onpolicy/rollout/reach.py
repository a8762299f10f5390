"""Asks the network, before anything is started, whether a run's servers can be where they should."""

from __future__ import annotations

from collections.abc import Sequence

import requests

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import ConfigError
from onpolicy.rollout.server import require_free_port
from onpolicy.system.network import free_port

SECONDS = (10.0, 60.0)
"""To connect, and to answer: a server that is sampling for another run answers late."""


def require_addresses(engine: EngineConfig, api_key: str) -> None:
    """Raise ConfigError if servers cannot listen where they are to be started, or are not where the
    run is to find them."""
    if engine.rollout_server_url:
        _require_servers(engine.rollout_server_url, api_key)
    else:
        require_place(engine.rollout_host, engine.rollout_base_port, engine.rollout_num_engines)


def require_place(host: str, base_port: int, num_servers: int = 1) -> None:
    """Raise ConfigError if servers cannot listen on `host`, on `base_port` and those after it."""
    try:
        if not host:
            raise OSError("an empty name")
        free_port(host)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"--rollout-host={host}: no server can listen there ({error}). Give an address of this "
            "host, such as 127.0.0.1, or leave the flag out."
        ) from error
    if base_port:
        for port in range(base_port, base_port + num_servers):
            require_free_port(host, port)


def _require_servers(urls: Sequence[str], api_key: str) -> None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    for url in urls:
        if problem := _problem(f"{url.rstrip('/')}/server_info", headers):
            raise ConfigError(
                f"--rollout-server-url={url}: {problem}. Start a server with `onpolicy serve`, and give "
                "the URL and the key that it prints."
            )


def _problem(url: str, headers: dict[str, str]) -> str | None:
    try:
        response = requests.get(url, headers=headers, timeout=SECONDS)
        if response.status_code in (401, 403):
            return "refuses --rollout-api-key" if headers else "asks for an --rollout-api-key"
        response.raise_for_status()
        is_server = isinstance(response.json()["internal_states"], list)
    except (requests.ConnectionError, requests.Timeout) as error:
        return f"nothing answers there ({_root(error)})"
    except (requests.RequestException, UnicodeError, ValueError, KeyError, TypeError):
        is_server = False
    return None if is_server else "what answers there is no SGLang server"


def _root(error: Exception) -> str:
    """The system's words for a failed connection, without what requests and urllib3 put around."""
    cause = getattr(error.args[0] if error.args else error, "reason", error)
    return str(cause).rsplit(": ", 1)[-1]
