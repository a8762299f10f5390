"""Names and shards of adapters, derived from the weights that they are beside.

One linear of Megatron may hold several of transformers, each with an adapter of its own:
`...self_attention.linear_qkv.lora.k_proj.B` is `...self_attn.k_proj.lora.B`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from transformers import PretrainedConfig

from onpolicy.contract import AdapterShape
from onpolicy.training.megatron.family import expert_size, is_sparse, num_experts
from onpolicy.training.megatron.parts import Block, Part

JOINED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "shared_gate": ("shared_expert_gate",),
    "output_layer": ("lm_head",),
}
"""Linears of transformers that one linear of Megatron holds, in the order of its rows."""

EXPERTS = "experts"
"""Name of all experts of a layer, which are one module in both."""

ADAPTED = {name for names in JOINED.values() for name in names} | {EXPERTS}


def adapter_shapes(
    config: PretrainedConfig, weights: Mapping[str, tuple[int, ...]], adapter: AdapterShape | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters' factors for these weights, by transformers' names."""
    shapes: dict[str, tuple[int, ...]] = {}
    if adapter is None:
        return shapes
    for name, (rows, *columns) in weights.items():
        linear, _, kind = name.rpartition(".")
        is_target = linear.rpartition(".")[2] in adapter.targets
        if is_target and kind == "weight" and ".experts." not in name:
            shapes[f"{linear}.lora.A"] = (adapter.rank, *columns)
            shapes[f"{linear}.lora.B"] = (rows, adapter.rank)
    for layer in range(config.num_hidden_layers * (EXPERTS in adapter.targets)):
        if is_sparse(config, layer):
            shapes |= _expert_shapes(f"model.layers.{layer}.mlp.experts", config, adapter)
    return shapes


def _expert_shapes(
    experts: str, config: PretrainedConfig, adapter: AdapterShape
) -> dict[str, tuple[int, ...]]:
    count, inner, hidden = num_experts(config), expert_size(config), config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for pair, rows, columns in (
        ("gate_up", (count, 2, inner), hidden),
        ("down", (count, hidden), inner),
    ):
        shapes[f"{experts}.lora.{pair}.A"] = (count, adapter.rank, columns)
        shapes[f"{experts}.lora.{pair}.B"] = (*rows, adapter.rank)
    return shapes


def adapter_parameters(parameters: Iterable[str], adapter: AdapterShape | None) -> list[str]:
    """Return Megatron's names of the factors for these parameters."""
    targets = adapter.targets if adapter is not None else ()
    names: list[str] = []
    for parameter in parameters:
        module, _, kind = parameter.rpartition(".")
        leaf = module.rpartition(".")[2]
        parts = JOINED.get(leaf, ()) if kind == "weight" else ()
        own = [f"{module}.lora.{part}" for part in parts if part in targets]
        names += [f"{name}.{factor}" for name in own for factor in "AB"]
        if leaf == EXPERTS and EXPERTS in targets:
            names += [f"{module}.lora.{kind}.{factor}" for factor in "AB"]
    return names


def adapter_part(parameter: str, parts_of: Callable[[str], Iterable[Part]]) -> Part:
    """Return a rank's part of a factor, given by Megatron's name.

    parts_of: the rank's parts of a weight. Its rows of one tensor must be contiguous.
    """
    linear, _, own = parameter.partition(".lora.")
    name, _, factor = own.partition(".")
    parts = [p for p in parts_of(f"{linear}.weight") if p.name.endswith(f"{name}.weight")]
    whole = f"{parts[0].name.removesuffix('.weight')}.lora.{factor}"
    first, last = parts[0].source, parts[-1].source
    if factor == "A":
        return Part(whole, (slice(None), *first[1:]), ())
    if not first or first[0] == slice(None):
        return Part(whole, (), ())
    start, stop = _rows(first).start, _rows(last).stop
    return Part(whole, (slice(start, stop),), (slice(0, stop - start),))


def expert_adapter_part(parameter: str, experts: slice, inner: slice) -> Part:
    """Return a rank's part of an experts' factor: some of the experts, and of each a part of the
    intermediate axis."""
    layers, _, own = parameter.partition(".mlp.experts.")
    layer = layers.rpartition(".")[2]
    is_cut = own in ("lora.down.A", "lora.gate_up.B")
    source: Block = (experts, slice(None), inner) if is_cut else (experts,)
    return Part(f"model.layers.{layer}.mlp.experts.{own}", source, ())


def _rows(block: Block) -> slice:
    rows = block[0]
    assert isinstance(rows, slice)
    return rows
