"""Addresses and ports to listen at: on this host alone, unless --rollout-host names another."""

import errno
import random
import socket
from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names gloo's interface; without it gloo listens where the host's name points to."""

LOOPBACK_INTERFACE = "lo"

PROXY_EXCEPTIONS = ("no_proxy", "NO_PROXY")
"""The two variables with exceptions from a proxy; programs read one, or prefer one to the other."""

EVERYTHING = "*"


def is_loopback(host: str) -> bool:
    return host in LOOPBACK


def proxy_exceptions(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return the variables that keep requests to this host, and to `hosts`, from a proxy. Hosts that
    the environment already names stay in them. No host is a range, which urllib does not know."""
    given = [environment.get(name, "").strip() for name in PROXY_EXCEPTIONS]
    if EVERYTHING in given:
        return dict.fromkeys(PROXY_EXCEPTIONS, EVERYTHING)
    named = [host.strip() for value in given for host in value.split(",")]
    unique = dict.fromkeys(host for host in [*named, *LOOPBACK, *hosts] if host)
    return dict.fromkeys(PROXY_EXCEPTIONS, ",".join(unique))


def is_of_this_host(host: str) -> bool:
    """Return whether an address, or a name of one, belongs to this host."""
    try:
        listen(host, 0).close()
    except OSError:
        return False
    return True


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError. A port whose last connections have just ended can
    be taken again (SO_REUSEADDR)."""
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
    """Return a free port below the range of outgoing connections (Linux: from 32768 on). A server
    listens on it some seconds later, when an outgoing connection could have taken a higher port.
    Raises OSError for a host where nothing can listen, UnicodeError for an invalid host name."""
    while True:
        try:
            with listen(host, random.SystemRandom().randrange(20000, 32000)) as listener:
                port: int = listener.getsockname()[1]
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
