"""The CPU's operators, made to have the same bits on every x86-64 processor with AVX2.

They are those of `ops/cpu` on kernels that all such processors have (`PORTABLE_KERNELS`), with
matrix products whose order is written down (`products.py`) and tried when they are made
(`order_check.py`). PyTorch's own AVX2 kernels are the same instructions everywhere, and so are
MKL's of exp, log, sin, cos and tanh. Not so MKL's square root: it refines an approximation that
AMD's processors make in another way than Intel's. No operator takes it, nor does the optimizer
(`OperatorsConfig.is_portable`).
"""

from __future__ import annotations

import torch

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu.gemms import Gemms
from onpolicy.ops.portable.order_check import require_order
from onpolicy.ops.portable.products import product

COLUMNS = 256
"""Columns of a tile of a product."""


class PortableOperators(CpuOperators):
    """`CpuOperators` with products in an order of their own.

    Creating them keeps PyTorch from calling oneDNN by itself.
    """

    column_tile = COLUMNS

    def __init__(self, num_threads: int = 1):
        """Raises ContractError if this process's libraries multiply in another order."""
        super().__init__(num_threads)
        # PyTorch asks for it by the processor's instructions, not by those that are in force.
        torch.backends.mkldnn.set_flags(False)
        self.gemms = Gemms(self.pool, product=product, columns=COLUMNS)
        require_order()
