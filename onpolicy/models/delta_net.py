"""Gated delta networks by the aligned operators: the linear attention of Qwen3-Next and Qwen3.5.

transformers' modules have one formula for a prompt and another for a decoded token, and know of packed
sequences only with kernels for GPUs. Here such a module keeps its parameters and its linears, and its
forward pass calls `Operators.causal_conv` and `Operators.gated_delta`. Where a sequence's earlier tokens
are, the caller says with the keyword `recurrence`. The modules are known by the names of their classes,
since they do too much for a probe.
Source: Qwen3NextGatedDeltaNet of transformers/models/qwen3_next/modeling_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from onpolicy.contract import DeltaShape
from onpolicy.errors import ContractError
from onpolicy.ops.base import Operators
from onpolicy.ops.layouts import AttentionLayout
from onpolicy.ops.recurrence import RecurrentLayout
from onpolicy.ops.shared_rows import SharedRows

DELTA_NETS = {
    "Qwen3NextGatedDeltaNet": "qwen3_next",
    "Qwen3_5GatedDeltaNet": "qwen3_5_text",
    "Qwen3_5MoeGatedDeltaNet": "qwen3_5_moe_text",
}
"""Known classes of transformers, and the model_type of the configurations that use each."""


class SharedPaths(NamedTuple):
    """The rows of all tokens of each sequence, where sequences share those of their prefixes."""

    rows: SharedRows
    """The row of every token of every sequence, one sequence after another."""

    own: Tensor
    """int64 [T]: which of these readings is each row's result."""


class LayerStates(NamedTuple):
    """The layout and the states that a layer computes with; see `Operators.gated_delta`."""

    layout: RecurrentLayout

    conv: Tensor | None = None
    """[slots, K - 1, C]; None in training."""

    delta: Tensor | None = None
    """float32 [slots, H_v, R, D_v]; None in training."""

    paths: SharedPaths | None = None


Recurrence = Callable[[int], LayerStates]
"""From the index of a layer to its states."""


def is_delta_net(module: nn.Module) -> bool:
    """Return whether it is a gated delta network of a known class."""
    kind = type(module)
    return kind.__name__ in DELTA_NETS and kind.__module__.startswith("transformers.models.")


def delta_nets(model: nn.Module) -> list[Any]:
    """Return the gated delta networks of a model, layer after layer."""
    return [module for module in model.modules() if is_delta_net(module)]


def parts_of_delta_nets(model: nn.Module) -> set[nn.Module]:
    """Return the modules that hold parameters of their own which the operators read."""
    return {part for net in delta_nets(model) for part in (net, net.conv1d, net.norm)}


def has_delta_nets(config: PretrainedConfig) -> bool:
    """Return whether a model of this configuration has gated delta networks of a known class."""
    return config.model_type in DELTA_NETS.values() and bool(recurrent_layers(config))


def recurrent_layers(config: PretrainedConfig) -> list[int]:
    """Return the indices of the layers that keep a state."""
    kinds = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]


def delta_shape(net: Any) -> DeltaShape:
    """Return the sizes of a network."""
    return DeltaShape(
        key_heads=net.num_k_heads,
        value_heads=net.num_v_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
        kernel_size=net.conv_kernel_size,
    )


def recurrence_of(layout: AttentionLayout) -> Recurrence:
    """Return the states of all layers in training: sequences are whole, and nothing is kept."""
    packed, paths = RecurrentLayout.packed(layout.key_lens), None
    if layout.shared_keys is not None:
        ends = torch.tensor(layout.key_lens).cumsum(0).tolist()
        pairs = zip(ends, layout.query_lens, strict=True)
        own = torch.cat([torch.arange(end - count, end) for end, count in pairs])
        paths = SharedPaths(layout.shared_keys, own.to(layout.key_rows.device))
    states = LayerStates(packed, paths=paths)
    return lambda layer: states


def recur_by_operators(net: Any, operators: Operators) -> None:
    """Make `net`, a gated delta network of a known class, compute by the operators."""
    net.operators, net.forward = operators, MethodType(_forward, net)


class _Projected(NamedTuple):
    """The inputs of a network after its linears: [T, ...] each."""

    mixed: Tensor
    """[T, C]: queries, keys and values before the convolution."""

    gate: Tensor
    """[T, H_v, D_v]"""

    b: Tensor
    a: Tensor


def _forward(
    net: Any,
    hidden_states: Tensor,
    cache_params: object = None,
    attention_mask: Tensor | None = None,
    recurrence: Recurrence | None = None,
    **others: object,
) -> Tensor:
    """Compute the network: [1, T, H] -> [1, T, H]. The other keywords are attention's."""
    if recurrence is None or cache_params is not None or attention_mask is not None:
        raise ContractError(
            f"{type(net).__name__}: needs the keyword `recurrence`, and neither a cache nor a mask. "
            "Call the model as onpolicy/models/policy.py does."
        )
    states, operators = recurrence(net.layer_idx), net.operators
    mixed, gate, b, a = _projected(net, hidden_states)
    if states.paths is not None:
        mixed, b, a = (states.paths.rows.take(x) for x in (mixed, b, a))
    weight = net.conv1d.weight.squeeze(1)
    mixed = operators.causal_conv(mixed, weight, net.conv1d.bias, states.layout, states.conv)
    mixed = operators.elementwise(ACT2FN[net.activation], mixed)
    q, k, v = mixed.split((net.key_dim, net.key_dim, net.value_dim), dim=-1)
    q, k = (x.unflatten(-1, (-1, net.head_k_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, net.head_v_dim))
    steps = operators.elementwise(F.softplus, a.float() + net.dt_bias.float())
    g = -net.A_log.float().exp() * steps  # a number per head, no operator's rows
    beta = operators.elementwise(torch.sigmoid, b)
    out = operators.gated_delta(q, k, v, g, beta, states.layout, states.delta)
    if states.paths is not None:
        out = out.index_select(0, states.paths.own)
    out = _gated_norm(net.norm, operators, out, gate)
    result: Tensor = net.out_proj(out.flatten(1)[None])
    return result


def _projected(net: Any, hidden: Tensor) -> _Projected:
    if hasattr(net, "in_proj_qkvz"):
        parts = net.in_proj_qkvz(hidden), net.in_proj_ba(hidden)
        q, k, v, gate, b, a = (x[0] for x in net.fix_query_key_value_ordering(*parts))
        return _Projected(torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1), gate, b, a)
    mixed, gate, b, a = (
        linear(hidden)[0]
        for linear in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    )
    return _Projected(mixed, gate.unflatten(-1, (-1, net.head_v_dim)), b, a)


def _gated_norm(norm: Any, operators: Operators, x: Tensor, gate: Tensor) -> Tensor:
    """Compute transformers' RMSNormGated: an RMS norm times the activated gate, float32, then rounded.

    x, gate: [T, H_v, D_v] -> [T, H_v, D_v].
    """
    normed = operators.rms_norm(x, norm.weight, norm.variance_epsilon)
    gates = operators.elementwise(ACT2FN[norm.activation], gate.float())
    return (normed.float() * gates).to(x.dtype)
