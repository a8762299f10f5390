"""Python's garbage collector, in a process whose imports make a million objects that stay."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000


def collect_rarely() -> None:
    """Look for garbage once in 50,000 new objects instead of 700: a fifth of the time of importing
    SGLang, or PyTorch and transformers, goes into looking in vain."""
    gc.set_threshold(_NEW_OBJECTS)
