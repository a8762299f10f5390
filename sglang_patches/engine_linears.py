"""Routing of every unquantised linear layer of the engine to the aligned linear.

Diverges in stock SGLang: `F.linear`, whose kernels depend on the number of rows and of columns; and
with tensor parallelism the sum over a K that ranks share (engine_ranks.py). SGLang also does not
know all styles of transformers' tensor-parallel plans, and one of them crashes it even on one rank;
they are mapped to known ones. Where all ranks have computed all heads (a norm over all of them, one
projection for q, k and v), each attends with its own.

Source: sglang/srt/layers/quantization/unquant.py, sglang/srt/layers/linear.py,
sglang/srt/layers/radix_attention.py, and _normalize_tp_style in sglang/srt/models/transformers.py.
Can go when SGLang lets a platform choose its GEMM and its reduction, and knows these styles.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.models.rounded_inputs import operators_of, round_inputs
from onpolicy.models.tensor_parallel import engine_style
from onpolicy.ops import Operators
from sglang_patches import registry
from sglang_patches.engine_ranks import own_part, row_parallel

TARGET = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply"
ROW_TARGET = "sglang.srt.layers.linear.RowParallelLinear.forward"
STYLE_TARGET = "sglang.srt.models.transformers._normalize_tp_style"
HEADS_TARGET = "sglang.srt.layers.radix_attention.RadixAttention.forward"


def install(operators: Operators, contract: NumericsContract) -> None:
    def apply(
        self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return operators_of(layer, operators).linear(x, layer.weight, bias)

    def row_forward(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = own_part(x, layer.input_size_per_partition)
        apart = layer.bias if layer.skip_bias_add else None
        bias = None if layer.skip_bias_add else layer.bias
        own = operators_of(layer, operators)
        return own.row_parallel_linear(x, layer.weight, bias, row_parallel(contract)), apart

    registry.hook(TARGET, apply, "replace")
    registry.hook(ROW_TARGET, row_forward, "replace")
    registry.hook(STYLE_TARGET, engine_style, "replace")
    registry.hook(HEADS_TARGET, _attend_with_own_heads, "around")


def prepare_linears(model: torch.nn.Module, contract: NumericsContract) -> None:
    """Set what adapters read on a loaded model's linears, and the rounding of their inputs."""
    from sglang.srt.layers.linear import LinearBase, RowParallelLinear

    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.row_parallel = row_parallel(contract)
    round_inputs(model, contract.activation_format, (LinearBase,))


def _attend_with_own_heads(
    original: Any,
    layer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    q = own_part(q, layer.tp_q_head_num * layer.qk_head_dim)
    k = own_part(k, layer.tp_k_head_num * layer.qk_head_dim)
    v = own_part(v, layer.tp_v_head_num * layer.v_head_dim)
    return original(layer, q, k, v, *args, **kwargs)
