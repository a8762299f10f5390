"""Lets torchvision's wheel import beside a CPU build of torch, in every process of an environment.

SGLang and transformers import torchvision for text models too. The wheel on PyPI is a CUDA build;
beside a CPU torch its C++ library does not load and the import fails with `operator
torchvision::nms does not exist`. Declaring the two operators that the import looks up is enough
for the pure Python part, which is all that text models touch. Where the library loads, nothing is done.

`make setup` copies this file and the .pth file beside it into site-packages; Python imports it
from there at its start, so it imports nothing itself. Both can go when PyPI has a CPU build.
"""

import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeOperatorsAreLookedUp:
    """Finds nothing itself; declares the operators when torchvision comes to need them."""

    fragment = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations":  # it has tried to load its library by now
            from torch import library, ops

            if not hasattr(ops.torchvision, "nms"):
                self.fragment = library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    self.fragment.define(f"{operator}{_SCHEMA}")


sys.meta_path.insert(0, _BeforeOperatorsAreLookedUp())
