"""A tower computes by the operators: on other kernels it has their bits, and no kernel is PyTorch's."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.images.pixels import PixelReader
from onpolicy.ops.cpu import CpuOperators
from tests.support.seeing_policies import FAMILIES, seeing_policy
from tests.support.tiny_images import make_image_checkpoint, picture

KERNELS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "attention",
    "layer_norm",
    "softmax",
    "gelu",
)


class Watched:
    """Operators that say whether one of them is at work."""

    at_work = 0

    def __init__(self, operators):
        self._operators = operators

    def __getattr__(self, name):
        function = getattr(self._operators, name)

        def watched(*args, **kwargs):
            Watched.at_work += 1
            try:
                return function(*args, **kwargs)
            finally:
                Watched.at_work -= 1

        return watched if callable(function) else function


class Elsewhere(TorchDispatchMode):
    """A record of kernels that no operator calls."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        if not Watched.at_work and any(kernel in name for kernel in KERNELS):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_norm_softmax_and_activation_of_a_tower_is_the_operators(family, tmp_path):
    path = make_image_checkpoint(tmp_path, family)
    policy, pixels = seeing_policy(path), PixelReader(path)(picture())
    tower = policy.causal_lm.base_model.tower
    for module in tower.modules():
        if hasattr(module, "operators"):
            module.operators = Watched(CpuOperators(1))
    with torch.no_grad(), Elsewhere() as elsewhere:
        tower(pixels)
    assert elsewhere.found == []
