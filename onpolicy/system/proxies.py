"""Proxies: the choice of one for external services, and requests of a run's processes without any."""

import ipaddress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import requests

from onpolicy.errors import ConfigError


def proxy_of(url: str, flag: str) -> str | None:
    """Return the proxy that the environment names for a service, or None for a direct connection.
    `https_proxy` or `http_proxy` applies by the service's scheme, else `all_proxy`. A service on
    this host, in a private network, or named by `no_proxy` is connected to directly. Raises
    ConfigError for a proxy of another kind than HTTP."""
    parts = urlsplit(url)
    host, proxies = parts.hostname or "", getproxies()
    kind = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
    proxy = proxies.get(kind) or proxies.get("all")
    if not proxy or not is_outside(host) or proxy_bypass(host):
        return None
    scheme = urlsplit(proxy if "://" in proxy else f"http://{proxy}").scheme
    if scheme not in ("http", "https"):
        name = f"{kind}_proxy" if proxies.get(kind) else "all_proxy"
        raise ConfigError(
            f"{flag}={url}: the environment's {name} is a proxy of {scheme}, and services are asked "
            f"through HTTP proxies alone. Name one in {kind}_proxy, or {host} in no_proxy."
        )
    return proxy if "://" in proxy else f"http://{proxy}"


def is_outside(host: str) -> bool:
    """Return whether a host may be on the internet. Addresses of private networks (RFC 1918,
    loopback, and the like) are not, nor names of one word, which only a local resolver knows."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host.strip(".") and not host.endswith(".localhost")


def ask(method: str, url: str, **given: Any) -> requests.Response:
    """Send one request to the server itself; `given` as for `requests.request`.

    `requests` alone would send it, and the key in its header, to the proxy that `http_proxy` or
    `ALL_PROXY` names, also for this host; and would replace the key by an entry of `~/.netrc`.
    """
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, **given)
