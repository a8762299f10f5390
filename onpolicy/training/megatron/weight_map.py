"""A map from blocks of Hugging Face tensors to their places in each rank's Megatron parameters.

One table serves both directions: loading copies blocks into parameters, exporting copies them out.
Names of Megatron parameters are global here: `decoder.layers.7.` is the model's eighth layer, whichever
pipeline stage holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from transformers import PretrainedConfig

from onpolicy.contract import AdapterShape
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.models.size import head_dim
from onpolicy.models.weight_files import VALUE_HEAD
from onpolicy.training.megatron.adapter_map import (
    adapter_parameters,
    adapter_part,
    adapter_shapes,
    expert_adapter_part,
)
from onpolicy.training.megatron.family import (
    Family,
    expert_size,
    family_of,
    is_so,
    is_sparse,
    num_experts,
    shared_expert_size,
)
from onpolicy.training.megatron.parts import Block, Part, is_expert
from onpolicy.training.megatron.rank_layout import MegatronLayout


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The parameters of one model under one layout."""

    config: PretrainedConfig
    layout: MegatronLayout
    has_values: bool = False
    """Whether a critic's head replaces the output projection."""

    adapter: AdapterShape | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every Hugging Face tensor of the model, in the order of export; adapters
        last."""
        stored = self.stored_shapes()
        return {**stored, **adapter_shapes(self.config, stored, self.adapter)}

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in a checkpoint."""
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab_size, c.hidden_size)}
        for layer in range(c.num_hidden_layers):
            shapes |= {self._stored(layer, leaf): s for leaf, s in self._layer_shapes(layer)}
        shapes[_FINAL_NORM] = (c.hidden_size,)
        if self.has_values:
            shapes |= {f"{VALUE_HEAD}weight": (1, c.hidden_size), f"{VALUE_HEAD}bias": (1,)}
        elif not c.tie_word_embeddings:
            shapes[HEAD] = (c.vocab_size, c.hidden_size)
        for layer in filter(partial(is_sparse, c), range(c.num_hidden_layers)):
            for name in self.family.router_buffers:
                shapes[self._stored(layer, f"mlp.gate.{name}")] = (num_experts(c),)
        return shapes

    def is_buffer(self, name: str) -> bool:
        """Return whether a tensor, by either name, is float32 and has no gradient."""
        return name.rpartition(".")[2] in self.family.router_buffers

    def _layer_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        c, norm = self.config, (self.config.hidden_size,)
        if not self.family.norms_after:
            yield "input_layernorm.weight", norm
        yield from self._attention_shapes()
        yield "post_attention_layernorm.weight", norm
        if is_sparse(c, layer):
            yield from self._sparse_shapes()
        else:
            yield from _mlp_shapes("mlp.", _LINEARS, c.intermediate_size, c.hidden_size)
        if self.family.norms_after:
            yield "post_feedforward_layernorm.weight", norm

    def _sparse_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        c = self.config
        yield "mlp.gate.weight", (num_experts(c), c.hidden_size)
        for expert in range(num_experts(c)):
            linears = self.family.expert_linears
            prefix = f"mlp.experts.{expert}."
            yield from _mlp_shapes(prefix, linears, expert_size(c), c.hidden_size)
        if shared := self.family.shared_expert:
            size = shared_expert_size(c)
            yield from _mlp_shapes(f"mlp.{shared}.", _LINEARS, size, c.hidden_size)
        if self.family.shared_expert_is_gated:
            yield f"mlp.{shared}_gate.weight", (1, c.hidden_size)

    def _attention_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, dim = self.config.hidden_size, head_dim(self.config)
        for name, heads in self._heads:
            yield f"self_attn.{name}_proj.weight", (heads * dim, hidden)
            if is_so(self.config, self.family.qkv_bias):
                yield f"self_attn.{name}_proj.bias", (heads * dim,)
        if is_so(self.config, self.family.qk_norm):
            joins = self.family.qk_norm_joins_heads
            for name, heads in self._heads[:2]:
                yield f"self_attn.{name}_norm.weight", (heads * dim if joins else dim,)
        yield "self_attn.o_proj.weight", (hidden, self.config.num_attention_heads * dim)

    def parameters(self, stage: int) -> list[str]:
        """Return global names of the parameters of one pipeline stage, and of the buffers it stores."""
        stages = self.layout.pipeline_model_parallel_size
        count = self.config.num_hidden_layers // stages
        names = ["embedding.word_embeddings.weight"] if stage == 0 else []
        for layer in range(stage * count, (stage + 1) * count):
            names += [f"decoder.layers.{layer}.{leaf}" for leaf in self._leaves(layer)]
        if stage == stages - 1:
            names.append("decoder.final_layernorm.weight")
            if self.has_values:
                names += [f"{_VALUE_HEAD}weight", f"{_VALUE_HEAD}bias"]
            elif not self.config.tie_word_embeddings or stage > 0:
                names.append("output_layer.weight")
        return [*names, *adapter_parameters(names, self.adapter)]

    def _leaves(self, layer: int) -> list[str]:
        attention = ["linear_qkv.weight", "linear_proj.weight"]
        if is_so(self.config, self.family.qkv_bias):
            attention.append("linear_qkv.bias")
        if is_so(self.config, self.family.qk_norm):
            attention += ["q_layernorm.weight", "k_layernorm.weight"]
        mlp = ["linear_fc1.weight", "linear_fc2.weight"]
        if is_sparse(self.config, layer):
            mlp = ["router.weight", "experts.gate_up", "experts.down"]
            mlp += [f"router.{name}" for name in self.family.router_buffers]
            if self.family.shared_expert:
                mlp += ["shared_expert.linear_fc1.weight", "shared_expert.linear_fc2.weight"]
            if self.family.shared_expert_is_gated:
                mlp.append("shared_gate.weight")
        norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        if self.family.norms_after:
            norms = [f"{end}.post_layernorm.weight" for end in _LAST_LINEARS]
        return [
            *norms,
            *(f"self_attention.{leaf}" for leaf in attention),
            *(f"mlp.{leaf}" for leaf in mlp),
        ]

    def parts(self, parameter: str, tp_rank: int, ep_rank: int) -> Iterator[Part]:
        """Yield the blocks that make up a parameter, by its global name, on the ranks of these
        indices."""
        if is_adapters(parameter):
            yield self._adapter_part(parameter, tp_rank, ep_rank)
            return
        if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied = parameter.startswith("embedding") or self.config.tie_word_embeddings
            rows = self._vocabulary_rows(tp_rank)
            if size := rows.stop - rows.start:
                yield Part(_EMBEDDING if tied else HEAD, (rows,), (slice(0, size),))
            return
        if parameter == "decoder.final_layernorm.weight":
            yield Part(_FINAL_NORM, (), ())
            return
        if parameter.startswith(_VALUE_HEAD):
            yield Part(VALUE_HEAD + parameter.removeprefix(_VALUE_HEAD), (), ())
            return
        _, _, number, *rest = parameter.split(".")
        layer, leaf = int(number), ".".join(rest)
        for name, source, target in self._layer_parts(leaf, tp_rank, ep_rank):
            yield Part(self._stored(layer, name), source, target)

    def _layer_parts(
        self, leaf: str, tp_rank: int, ep_rank: int
    ) -> Iterator[tuple[str, Block, Block]]:
        kind = leaf.rpartition(".")[2]
        if leaf in _WHOLE:
            yield _WHOLE[leaf], (), ()
        elif leaf.startswith("self_attention.linear_qkv."):
            yield from self._query_key_value(kind, tp_rank)
        elif leaf == "self_attention.linear_proj.weight":
            columns = self._share(self.config.num_attention_heads * head_dim(self.config), tp_rank)
            yield "self_attn.o_proj.weight", (slice(None), columns), ()
        elif leaf.startswith("mlp.experts."):
            yield from self._experts(kind, tp_rank, ep_rank)
        elif leaf.startswith("mlp.router."):
            yield f"mlp.gate.{kind}", (), ()
        elif leaf == "mlp.shared_gate.weight":
            yield f"mlp.{self.family.shared_expert}_gate.weight", (), ()
        elif leaf.startswith("mlp.shared_expert."):
            size = shared_expert_size(self.config)
            is_whole = self.family.shared_expert_is_whole
            share = slice(0, size) if is_whole else self._share(size, tp_rank)
            yield from _mlp_parts(leaf, f"mlp.{self.family.shared_expert}.", share)
        else:
            share = self._share(self.config.intermediate_size, tp_rank)
            yield from _mlp_parts(leaf, "mlp.", share)

    def _query_key_value(self, kind: str, tp_rank: int) -> Iterator[tuple[str, Block, Block]]:
        """Yield the blocks of a linear_qkv: each group has its queries, its key, then its value."""
        groups = self._share(self.config.num_key_value_heads, tp_rank)
        row = 0
        for group in range(groups.start, groups.stop):
            for name, heads in self._heads:
                size = heads // self.config.num_key_value_heads * head_dim(self.config)
                source = (slice(group * size, (group + 1) * size),)
                yield f"self_attn.{name}_proj.{kind}", source, (slice(row, row + size),)
                row += size

    def _experts(self, kind: str, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, Block, Block]]:
        count = num_experts(self.config) // self.layout.expert_model_parallel_size
        share = self._share(expert_size(self.config), tp_rank)
        gate, up, down = self.family.expert_linears
        for local in range(count):
            expert = f"mlp.experts.{ep_rank * count + local}."
            if kind == "gate_up":
                yield f"{expert}{gate}.weight", (share,), (local, 0)
                yield f"{expert}{up}.weight", (share,), (local, 1)
            else:
                yield f"{expert}{down}.weight", (slice(None), share), (local,)

    def _adapter_part(self, parameter: str, tp_rank: int, ep_rank: int) -> Part:
        if not is_expert(parameter):
            return adapter_part(parameter, lambda weight: self.parts(weight, tp_rank, ep_rank))
        count = num_experts(self.config) // self.layout.expert_model_parallel_size
        experts = slice(ep_rank * count, (ep_rank + 1) * count)
        return expert_adapter_part(
            parameter, experts, self._share(expert_size(self.config), tp_rank)
        )

    def _stored(self, layer: int, leaf: str) -> str:
        """Return a checkpoint's name of a tensor, from its name within a layer of transformers."""
        if leaf.startswith("mlp.") and is_sparse(self.config, layer):
            leaf = self.family.sparse_name + leaf.removeprefix("mlp")
        return f"model.layers.{layer}.{leaf}"

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def _heads(self) -> tuple[tuple[str, int], ...]:
        key_value = self.config.num_key_value_heads
        return ("q", self.config.num_attention_heads), ("k", key_value), ("v", key_value)

    def _share(self, size: int, tp_rank: int) -> slice:
        part = size // self.layout.tensor_model_parallel_size
        return slice(tp_rank * part, (tp_rank + 1) * part)

    def _vocabulary_rows(self, tp_rank: int) -> slice:
        size, ranks = self.config.vocab_size, self.layout.tensor_model_parallel_size
        part = -(-size // ranks)
        return slice(min(tp_rank * part, size), min((tp_rank + 1) * part, size))


_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_VALUE_HEAD = "value_head."

_LAST_LINEARS = ("self_attention.linear_proj", "mlp.linear_fc2")

_LINEARS = ("gate_proj", "up_proj", "down_proj")

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
"""Parameters that every tensor-parallel rank holds whole."""


def _mlp_shapes(
    prefix: str, linears: tuple[str, str, str], intermediate: int, hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate, up, down = linears
    yield f"{prefix}{gate}.weight", (intermediate, hidden)
    yield f"{prefix}{up}.weight", (intermediate, hidden)
    yield f"{prefix}{down}.weight", (hidden, intermediate)


def _mlp_parts(leaf: str, prefix: str, share: slice) -> Iterator[tuple[str, Block, Block]]:
    """Yield the blocks of Megatron's MLP, whose first linear holds gate, then up."""
    gate, up, down = _LINEARS
    size = share.stop - share.start
    if leaf.endswith("linear_fc1.weight"):
        yield f"{prefix}{gate}.weight", (share,), (slice(0, size),)
        yield f"{prefix}{up}.weight", (share,), (slice(size, 2 * size),)
    else:
        yield f"{prefix}{down}.weight", (slice(None), share), ()
