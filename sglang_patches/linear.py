"""Routes every unquantised linear layer of the engine to the aligned linear.

Diverges in stock SGLang: `F.linear`, whose kernels depend on the number of rows.
Source: sglang/srt/layers/quantization/unquant.py. Can go when SGLang lets a platform choose its GEMM.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"


def install(operators: Operators) -> None:
    def apply(
        self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return operators.linear(x, layer.weight, bias)

    registry.hook(TARGET, apply, "replace")
