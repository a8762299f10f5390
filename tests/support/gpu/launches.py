"""Remembers the kernels that were launched last, with their tiles, for the message of a failure."""

import os
from collections import deque

KEPT = 3

_last = deque(maxlen=KEPT)


def watch_launches():
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


def last_launches():
    """The last kernels that differ from each other, the latest first; empty if there were none."""
    return "; ".join(reversed(_last))


def _watched(run):
    def watched(self, *args, **kwargs):
        function = getattr(self, "fn", self)
        launch = _described(getattr(function, "__name__", str(function)), kwargs)
        if launch in _last:
            _last.remove(launch)
        _last.append(launch)
        return run(self, *args, **kwargs)

    watched.watched = True
    return watched


def _described(name, options):
    """Example: _linear_kernel ROWS=64 COLUMNS=128 num_warps=4"""
    tile = [
        f"{key}={value}"
        for key, value in options.items()
        if isinstance(value, int) and (key.isupper() or key in ("num_warps", "num_stages"))
    ]
    return " ".join([name, *tile])
