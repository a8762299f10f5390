"""The GPU's compute capability, and the memory layout that the kernels need."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

UNFUSED = {"enable_fp_fusion": False}
"""Launch option of every kernel: products and sums round as they are written, in all versions of
Triton and wherever the compiler sees them side by side. `tl.dot` is not affected."""


def capability(x: Tensor) -> int:
    """Return the compute capability of the GPU that holds `x`, as 80, 86, 89 or 90.

    It is 80 for a tensor on the CPU, where only Triton's interpreter can run a kernel.
    """
    return _capability(x.device.index or 0) if x.is_cuda else 80


@cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def whole(x: Tensor) -> Tensor:
    """Return `x` contiguous and on a 16-byte boundary.

    Triton compiles a second kernel for pointers off such a boundary. It loads other vectors, so a
    sum over a row is distributed over threads differently and may end in other bits.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n > 0; Triton's blocks have such sizes."""
    return 1 << (n - 1).bit_length()
