"""Import of transformers without optional packages that no process of ours uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("scipy", "trio", "httpx._main")
"""Packages of losses for object detection, of another event loop, and of a command line. Whoever
imports them copes without them: they are a third of the modules of transformers' own import."""

OF_IMAGES = ("torchvision",)
"""Packages that only a server may need, for a model that reads images."""


def import_transformers(*, reads_images: bool = False) -> None:
    """Import the base of transformers' models without UNUSED, and OF_IMAGES unless a model may read
    images; transformers then counts them as not installed. Everyone can import them as before."""
    with _missing(UNUSED if reads_images else (*UNUSED, *OF_IMAGES)):
        importlib.import_module("transformers.modeling_utils")


@contextmanager
def _missing(names: tuple[str, ...]) -> Iterator[None]:
    """Let imports of modules that are not imported yet fail within the context."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
