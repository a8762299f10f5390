"""Lets torchvision's wheel import beside a CPU build of torch.

SGLang and transformers import torchvision for text models too. The wheel on PyPI is a CUDA build;
beside a CPU torch its C++ library does not load and the import fails with `operator
torchvision::nms does not exist`. Declaring the two operators that the import looks up is enough
for the pure Python part, which is all that text models touch. It must happen before the import, in
every process, so an import hook does it. Can go when PyPI has a CPU build of torchvision.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing itself; declares the operators when somebody looks for torchvision."""

    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            self.library = _declare_operators()


def _declare_operators() -> Any:
    import torch

    if torch.version.cuda is not None:
        return False
    try:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
    except RuntimeError:  # declared already
        return False
    return library


def install() -> None:
    """Put the import hook in place, once."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())
