"""A watch that notices when the head of a joined cluster is gone.

Ray itself retries its GCS for a minute, and then aborts this process from C++.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onpolicy.errors import EngineError

logger = logging.getLogger(__name__)

PATIENCE = 10.0
"""The seconds that a restarted head has to answer."""

_POLL_SECONDS = 0.5

_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 2),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)
"""The keepalive options: the kernel gives up a host without power, which closes nothing, after 11 s."""


@contextmanager
def watching(address: str, on_loss: Callable[[EngineError], None]) -> Iterator[None]:
    """Hold a connection to the GCS at `address` within the context.

    Call `on_loss` once, in another thread, if it ends and no new one can be made within PATIENCE.
    """
    has_ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(address, has_ended, on_loss), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        has_ended.set()


def _watch(
    address: str, has_ended: threading.Event, on_loss: Callable[[EngineError], None]
) -> None:
    answered = time.monotonic()
    is_missed = False
    while not has_ended.is_set():
        try:
            with _connected(address) as connection:
                if is_missed:
                    logger.warning("the head of the Ray cluster at %s answers again", address)
                is_missed = False
                _hold(connection, has_ended)
                answered = time.monotonic()
        except OSError as error:
            if has_ended.wait(_POLL_SECONDS):
                return
            if not is_missed:
                logger.warning("the head of the Ray cluster at %s does not answer", address)
            is_missed = True
            if time.monotonic() - answered > PATIENCE:
                on_loss(_lost(address, error))
                return


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 2)
    for option, level, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)
    return connection


def _hold(connection: socket.socket, has_ended: threading.Event) -> None:
    """Return when the other end closes the connection; a GCS also closes a silent one."""
    connection.settimeout(_POLL_SECONDS)
    while not has_ended.is_set():
        try:
            if not connection.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def _lost(address: str, error: OSError) -> EngineError:
    return EngineError(
        f"the head of the Ray cluster at {address} is gone ({error.strerror or error}, for "
        f"{PATIENCE:.0f} seconds), and nothing on any host can be started or asked without it. Start it "
        "and the other hosts again (`ray start`), then this command, a run that saves with --load."
    )
