"""Import of torchvision's wheel beside a CPU build of torch.

SGLang and transformers import torchvision for text models too. The wheel on PyPI is a CUDA build;
beside a CPU torch its C++ library does not load and the import fails with `operator
torchvision::nms does not exist`. Declaring the two operators that the import looks up is enough
for the pure Python part, which is all that text models touch. Where the library loads, nothing is
done. `make setup` also has every process of `.venv` call `let_torchvision_import` at its start.
Can go when PyPI has a CPU build.
"""

import sys

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeOperatorsAreLookedUp:
    """A finder of nothing, which declares the operators when torchvision comes to need them."""

    fragment: object = None

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torchvision._meta_registrations":  # it has tried to load its library by now
            from torch import library, ops

            if not hasattr(ops.torchvision, "nms"):
                self.fragment = fragment = library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    fragment.define(f"{operator}{_SCHEMA}")


def let_torchvision_import() -> None:
    """Declare what torchvision's import looks up, once it does. Imports nothing itself."""
    if not any(isinstance(finder, _BeforeOperatorsAreLookedUp) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeOperatorsAreLookedUp())
