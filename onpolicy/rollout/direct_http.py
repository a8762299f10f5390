"""HTTP requests between a run's own processes, without the environment's proxies and passwords."""

from __future__ import annotations

from typing import Any

import requests


def ask(method: str, url: str, **given: Any) -> requests.Response:
    """Send one request to the server itself; `given` as for `requests.request`.

    `requests` alone would send it, and the key in its header, to the proxy that `http_proxy` or
    `ALL_PROXY` names, also for this host; and would replace the key by an entry of `~/.netrc`.
    """
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, **given)
