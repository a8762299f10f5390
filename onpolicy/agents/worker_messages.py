"""Messages between a run and its worker processes, over a socket, each with its length before it.

A worker sends JSON, so that its messages become nothing but numbers and text in the run's process.
The run, which a worker has to trust, sends pickle.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any

from onpolicy.rollout.failures import ContextExceededError
from onpolicy.system.json_values import default

MAX_SIZE = 64 << 20
"""The most bytes of a message."""

ERRORS = {kind.__name__: kind for kind in (ContextExceededError, TypeError, ValueError)}
"""The errors that a branch raises for a mistake in its function; others are AgentErrors."""

_LENGTH = struct.Struct("=I")

Message = dict[str, Any]


def from_worker(message: Message) -> bytes:
    """Return a message, with NumPy's numbers converted. Raises TypeError or ValueError."""
    return _framed(json.dumps(message, default=default).encode())


def from_run(message: Message) -> bytes:
    return _framed(pickle.dumps(message))


def _framed(data: bytes) -> bytes:
    if len(data) > MAX_SIZE:
        raise ValueError(f"a message of {len(data)} bytes, and at most {MAX_SIZE} may be sent")
    return _LENGTH.pack(len(data)) + data


class Parser:
    """A parser of one side's byte stream."""

    def __init__(self, load: Callable[[bytes], Message]):
        self._load, self._data = load, bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes. Raises ValueError for an invalid one."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if size > MAX_SIZE:
                raise ValueError(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._data) < end:
                return
            message = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield self._load(message)
