"""Where sockets listen: on this host alone, unless a run is told otherwise with --rollout-host."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Gloo's variable; without it gloo listens where the host's name points to."""

LOOPBACK_INTERFACE = "lo"


PROXY_EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""Programs read one of the two, or prefer one to the other."""

EVERYTHING = "*"


def is_loopback(host: str) -> bool:
    return host in LOOPBACK


def proxy_exceptions(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return the variables that keep requests to this host, and to `hosts`, from a proxy.

    Hosts that the environment already names stay in them. They are names and addresses, not ranges:
    Python's urllib knows no ranges.
    """
    given = [environment.get(name, "").strip() for name in PROXY_EXCEPTIONS]
    if EVERYTHING in given:
        return dict.fromkeys(PROXY_EXCEPTIONS, EVERYTHING)
    named = [host.strip() for value in given for host in value.split(",")]
    unique = dict.fromkeys(host for host in [*named, *LOOPBACK, *hosts] if host)
    return dict.fromkeys(PROXY_EXCEPTIONS, ",".join(unique))


def is_of_this_host(host: str) -> bool:
    """Whether an address, or a name of one, is one of this host's."""
    try:
        listen(host, 0).close()
    except OSError:
        return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError.

    A port whose last connections have just ended can be taken again (SO_REUSEADDR), as servers do.
    """
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def free_port(host: str) -> int:
    """A free port below those that systems give to outgoing connections (Linux: from 32768 on).

    A server listens on it seconds after it was chosen; by then a connection could have taken another.
    Raises OSError for a host where nothing can listen, UnicodeError for what is no name of one.
    """
    while True:
        try:
            with listen(host, random.SystemRandom().randrange(20000, 32000)) as listener:
                port: int = listener.getsockname()[1]
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
