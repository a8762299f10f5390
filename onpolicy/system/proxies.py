"""The choice of a proxy for requests to external services; a run's processes use none."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from onpolicy.errors import ConfigError


def proxy_of(url: str, flag: str) -> str | None:
    """Return the proxy that the environment names for a service, or None for a direct connection.

    `https_proxy` or `http_proxy` applies by the service's scheme, else `all_proxy`. A service on this
    host, in a private network, or named by `no_proxy` is connected to directly. Raises ConfigError for a
    proxy of another kind than HTTP.
    """
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
    """Return whether a host may be on the internet.

    Addresses of private networks (RFC 1918, loopback, and the like) are not, nor names of one word,
    which only a local resolver knows.
    """
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host.strip(".") and not host.endswith(".localhost")
