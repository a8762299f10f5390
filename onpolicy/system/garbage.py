"""A setting of Python's garbage collector, for imports that make a million long-lived objects."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Collect garbage every 50,000 new objects instead of 700: a fifth of the import time of SGLang, or
    of PyTorch and transformers, goes into futile collections."""
    gc.set_threshold(_NEW_OBJECTS)
