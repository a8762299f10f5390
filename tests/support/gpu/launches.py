"""Remembers the kernels that were launched last, with their tiles, for the message of a failure."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

KEPT = 3

_last: deque[str] = deque(maxlen=KEPT)


def watch_launches() -> None:
    """From now on note every launch of a Triton kernel; have DeepGEMM print the tiles it chooses."""
    os.environ.setdefault("DG_PRINT_CONFIGS", "1")
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    for kind in (JITFunction, InterpretedFunction):
        if not hasattr(kind.run, "watched"):
            kind.run = _watched(kind.run)


def last_launches() -> str:
    """The last kernels that differ from each other, the latest first; empty if there were none."""
    return "; ".join(reversed(_last))


def _watched(run: Any) -> Any:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self, "fn", self)
        launch = _described(getattr(function, "__name__", str(function)), kwargs)
        if launch in _last:
            _last.remove(launch)
        _last.append(launch)
        return run(self, *args, **kwargs)

    watched.watched = True  # type: ignore[attr-defined]
    return watched


def _described(name: str, options: dict[str, Any]) -> str:
    """Example: _linear_kernel ROWS=64 COLUMNS=128 num_warps=4"""
    tile = [
        f"{key}={value}"
        for key, value in options.items()
        if isinstance(value, int) and (key.isupper() or key in ("num_warps", "num_stages"))
    ]
    return " ".join([name, *tile])
