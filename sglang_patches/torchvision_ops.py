"""Lets torchvision's wheel import beside a CPU build of torch.

SGLang and transformers import torchvision for text models too. The wheel on PyPI is a CUDA build;
beside a CPU torch its C++ library does not load and the import fails with `operator
torchvision::nms does not exist`. Declaring the two operators that the import looks up is enough
for the pure Python part, which is all that text models touch.

Must run before anything imports torchvision, in every process: import it first in a main module.
Can go when PyPI has a CPU build of torchvision.
"""

import importlib.util

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare_operators() -> torch.library.Library | None:
    """Declare torchvision's operators if torch has no CUDA and nothing else declared them."""
    if torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return None
    try:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
    except RuntimeError:  # declared already, by torchvision itself or by an earlier import
        return None
    return library


_library = declare_operators()
