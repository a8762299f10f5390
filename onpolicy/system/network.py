"""Where sockets listen: on this host alone, unless a run is told otherwise with --rollout-host."""

from __future__ import annotations

import errno
import random
import socket

LOOPBACK = ("127.0.0.1", "localhost", "::1")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Gloo's variable; without it gloo listens where the host's name points to."""

LOOPBACK_INTERFACE = "lo"


def is_loopback(host: str) -> bool:
    return host in LOOPBACK


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
