"""Which block of which Hugging Face tensor stands where in which rank's Megatron parameter.

One table serves both directions: loading copies blocks into parameters, exporting copies them out.
Names of Megatron parameters are global here: `decoder.layers.7.` is the model's eighth layer,
whichever pipeline stage holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from onpolicy.train.megatron.layout import MegatronLayout, is_sparse

Block = tuple[int | slice, ...]
"""Indexes a tensor: one entry per leading axis, whole axes left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a Hugging Face tensor, and the block of a parameter that holds it."""

    name: str
    """Hugging Face's. Example: 'model.layers.0.self_attn.q_proj.weight'"""

    source: Block
    target: Block


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The parameters of one model under one layout."""

    config: PretrainedConfig
    layout: MegatronLayout

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor of the model, in the order in which they are exported."""
        c = self.config
        hidden, dim = c.hidden_size, self._head_dim
        norm = (hidden,)
        shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab_size, hidden)}
        for layer in range(c.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = norm
            for name, heads in self._heads:
                shapes[f"{prefix}self_attn.{name}_proj.weight"] = (heads * dim, hidden)
                if c.model_type == "qwen2":
                    shapes[f"{prefix}self_attn.{name}_proj.bias"] = (heads * dim,)
            if c.model_type.startswith("qwen3"):
                shapes[f"{prefix}self_attn.q_norm.weight"] = (dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, c.num_attention_heads * dim)
            shapes[f"{prefix}post_attention_layernorm.weight"] = norm
            if not is_sparse(c, layer):
                shapes |= _mlp_shapes(f"{prefix}mlp.", c.intermediate_size, hidden)
                continue
            shapes[f"{prefix}mlp.gate.weight"] = (c.num_experts, hidden)
            for expert in range(c.num_experts):
                mlp = f"{prefix}mlp.experts.{expert}."
                shapes |= _mlp_shapes(mlp, c.moe_intermediate_size, hidden)
        shapes[_FINAL_NORM] = norm
        if not c.tie_word_embeddings:
            shapes[_HEAD] = (c.vocab_size, hidden)
        return shapes

    def parameters(self, stage: int) -> list[str]:
        """Global names of the parameters of one pipeline stage."""
        stages = self.layout.pipeline_model_parallel_size
        count = self.config.num_hidden_layers // stages
        names = ["embedding.word_embeddings.weight"] if stage == 0 else []
        for layer in range(stage * count, (stage + 1) * count):
            names += [f"decoder.layers.{layer}.{leaf}" for leaf in self._leaves(layer)]
        if stage == stages - 1:
            names.append("decoder.final_layernorm.weight")
            if not self.config.tie_word_embeddings or stage > 0:
                names.append("output_layer.weight")
        return names

    def _leaves(self, layer: int) -> list[str]:
        attention = ["linear_qkv.weight", "linear_proj.weight"]
        if self.config.model_type == "qwen2":
            attention.append("linear_qkv.bias")
        if self.config.model_type.startswith("qwen3"):
            attention += ["q_layernorm.weight", "k_layernorm.weight"]
        mlp = ["linear_fc1.weight", "linear_fc2.weight"]
        if is_sparse(self.config, layer):
            mlp = ["router.weight", "experts.gate_up", "experts.down"]
        return [
            "input_layernorm.weight",
            *(f"self_attention.{leaf}" for leaf in attention),
            "pre_mlp_layernorm.weight",
            *(f"mlp.{leaf}" for leaf in mlp),
        ]

    def parts(self, parameter: str, tp_rank: int, ep_rank: int) -> Iterator[Part]:
        """The blocks that make up a parameter, by its global name, on the ranks of these indices."""
        if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied = parameter.startswith("embedding") or self.config.tie_word_embeddings
            rows = self._vocabulary_rows(tp_rank)
            if size := rows.stop - rows.start:
                yield Part(_EMBEDDING if tied else _HEAD, (rows,), (slice(0, size),))
            return
        if parameter == "decoder.final_layernorm.weight":
            yield Part(_FINAL_NORM, (), ())
            return
        _, _, layer, *rest = parameter.split(".")
        prefix, leaf = f"model.layers.{layer}.", ".".join(rest)
        if leaf in _WHOLE:
            yield Part(prefix + _WHOLE[leaf], (), ())
        elif leaf.startswith("self_attention.linear_qkv."):
            yield from self._query_key_value(f"{prefix}self_attn.", rest[-1], tp_rank)
        elif leaf == "self_attention.linear_proj.weight":
            columns = self._share(self.config.num_attention_heads * self._head_dim, tp_rank)
            yield Part(f"{prefix}self_attn.o_proj.weight", (slice(None), columns), ())
        elif leaf == "mlp.linear_fc1.weight":
            rows = self._share(self.config.intermediate_size, tp_rank)
            size = rows.stop - rows.start
            for i, name in enumerate(("gate", "up")):
                block = (slice(i * size, (i + 1) * size),)
                yield Part(f"{prefix}mlp.{name}_proj.weight", (rows,), block)
        elif leaf == "mlp.linear_fc2.weight":
            columns = self._share(self.config.intermediate_size, tp_rank)
            yield Part(f"{prefix}mlp.down_proj.weight", (slice(None), columns), ())
        else:
            yield from self._experts(f"{prefix}mlp.experts.", rest[-1], tp_rank, ep_rank)

    def _query_key_value(self, prefix: str, kind: str, tp_rank: int) -> Iterator[Part]:
        """Megatron keeps the queries of a group, then its key, then its value; then the next group."""
        groups = self._share(self.config.num_key_value_heads, tp_rank)
        row = 0
        for group in range(groups.start, groups.stop):
            for name, heads in self._heads:
                size = heads // self.config.num_key_value_heads * self._head_dim
                source = (slice(group * size, (group + 1) * size),)
                yield Part(f"{prefix}{name}_proj.{kind}", source, (slice(row, row + size),))
                row += size

    def _experts(self, prefix: str, kind: str, tp_rank: int, ep_rank: int) -> Iterator[Part]:
        count = self.config.num_experts // self.layout.expert_model_parallel_size
        share = self._share(self.config.moe_intermediate_size, tp_rank)
        for local in range(count):
            expert = f"{prefix}{ep_rank * count + local}."
            if kind == "gate_up":
                yield Part(f"{expert}gate_proj.weight", (share,), (local, 0))
                yield Part(f"{expert}up_proj.weight", (share,), (local, 1))
            else:
                yield Part(f"{expert}down_proj.weight", (slice(None), share), (local,))

    @property
    def _head_dim(self) -> int:
        c = self.config
        head_dim: int = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return head_dim

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


def is_expert(parameter: str) -> bool:
    """Whether a parameter, by its name, is shared by expert parallelism."""
    return ".mlp.experts." in parameter


_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Parameters that every tensor-parallel rank holds whole."""


def _mlp_shapes(prefix: str, intermediate: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (intermediate, hidden),
        f"{prefix}up_proj.weight": (intermediate, hidden),
        f"{prefix}down_proj.weight": (hidden, intermediate),
    }
