"""Routes every unquantised linear layer of the engine to the aligned linear.

Diverges in stock SGLang: `F.linear`, whose kernels depend on the number of rows and of columns; and
with tensor parallelism the sum over a K that ranks share (tensor_parallel.py).
Source: sglang/srt/layers/quantization/unquant.py and linear.py. Can go when SGLang lets a platform
choose its GEMM and its reduction.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.ops import Operators
from sglang_patches import registry
from sglang_patches.tensor_parallel import row_parallel

TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
ROW_TARGET = "sglang.srt.layers.linear.RowParallelLinear.forward"


def install(operators: Operators, contract: NumericsContract) -> None:
    def apply(
        self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return operators.linear(x, layer.weight, bias)

    def row_forward(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not layer.input_is_parallel:
            x = x.chunk(layer.tp_size, dim=-1)[layer.tp_rank]
        apart = layer.bias if layer.skip_bias_add else None
        bias = None if layer.skip_bias_add else layer.bias
        out = operators.row_parallel_linear(x, layer.weight, bias, row_parallel(contract))
        return out, apart

    registry.hook(TARGET, apply, "replace")
    registry.hook(ROW_TARGET, row_forward, "replace")
