"""Requests between a run's own processes, which take no proxy and no password from the environment."""

from __future__ import annotations

from typing import Any

import requests


def ask(method: str, url: str, **given: Any) -> requests.Response:
    """Send one request, as `requests.request` does with `given`, to the server itself.

    `requests` would send it, and the key in its header, to the proxy that `http_proxy` or `ALL_PROXY`
    names, also for this host; and would put what `~/.netrc` holds in place of the key.
    """
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, **given)
