"""The linears that tensor parallelism shards along K, and the models that it can shard.

Hugging Face configurations carry a plan, `base_model_tp_plan`, and SGLang's transformers backend
shards by it. Linears that sum over a sharded K must sum in the same order in an engine without
tensor parallelism, so the plan is read here exactly as SGLang reads it.
Source: sglang/srt/models/transformers.py, TransformersBase.recursive_replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from onpolicy.contract import OperatorShapes
from onpolicy.errors import ConfigError
from onpolicy.models.expert_layers import has_usual_experts
from onpolicy.models.facts import ModelFacts
from onpolicy.models.stored import stored_tensors

STYLES = {
    "colwise": "colwise",
    "colwiseparallel": "colwise",
    "local_colwise": "colwise",
    "packed_colwise": "colwise",
    "colwise_rep": "colwise_rep",
    "colwise_gather_output": "colwise_rep",
    "rowwise": "rowwise",
    "rowwiseparallel": "rowwise",
    "local_rowwise": "rowwise",
    "packed_rowwise": "rowwise",
    "local_packed_rowwise": "rowwise",
    "rowwise_rep": "rowwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "isolated": "replicate",
    "local": "replicate",
    "moe_tp_experts": "replicate",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",
}
"""Styles of a plan, and how SGLang shards a linear of each. Two styles of transformers 5 are
missing in SGLang under these names; `sglang_patches/engine_linears.py` maps them."""

ROWWISE = {"rowwise", "rowwise_rep"}
"""Styles that give each rank a part of K."""

WHOLE = "replicate"
"""Style of a linear that no pattern matches, and on one rank of an unknown style."""


def engine_style(style: str) -> str:
    """Return SGLang's name for a plan's style; a layer of unknown style is replicated."""
    return STYLES.get(_plain(style), WHOLE)


def _plain(style: str) -> str:
    return style.lower().replace("-", "_")


def row_parallel_linears(model: PreTrainedModel) -> set[nn.Linear]:
    """Return the linears of a causal LM that the model's plan shards along K."""
    styles = _styles_of_linears(model)
    return {linear for linear, style in styles.items() if engine_style(style) in ROWWISE}


def unknown_styles(model: PreTrainedModel) -> list[str]:
    """Return the styles of the model's linears that cannot be sharded in a known way."""
    styles = _styles_of_linears(model).values()
    # SGLang shards a packed layer's columns as if it held one matrix.
    return sorted({s for s in styles if _plain(s) not in STYLES or _plain(s) == "packed_colwise"})


def whole_attention(model: PreTrainedModel) -> list[str]:
    """Return the attention classes that the plan replicates on every rank, as DeepSeek-V3's does."""
    shared = row_parallel_linears(model)
    attention = [m for m in model.base_model.modules() if hasattr(m, "is_causal")]
    return sorted({type(m).__name__ for m in attention if not shared & set(m.children())})


def fused_experts(model: PreTrainedModel) -> list[str]:
    """Return the expert classes that a checkpoint holds in one tensor per layer, as Llama-4's does."""
    stored_whole = (
        type(module).__name__
        for name, module in model.named_modules()
        if has_usual_experts(module)
        for key, tensor in module.named_parameters(recurse=False)
        if any(part is tensor for part in stored_tensors(model, f"{name}.{key}", tensor).values())
    )
    return sorted(set(stored_whole))


def _styles_of_linears(model: PreTrainedModel) -> dict[nn.Linear, str]:
    plan = {
        "model." + re.sub(r"^(\^?)model(\\?)\.", r"\1", pattern): style
        for pattern, style in (model.config.base_model_tp_plan or {}).items()
    }

    def style(name: str) -> str:
        matches = (plan[pattern] for pattern in plan if re.match(pattern, f"model.{name}"))
        return next(matches, WHOLE)

    return {
        module: style(name)
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear)
    }


def require_shardable(
    facts: ModelFacts, shapes: OperatorShapes, *, tp_size: int, blocks: int
) -> None:
    """Raise ConfigError if `tp_size` ranks cannot share the model, or `blocks` cannot divide its sums.

    The error names the size, the rule and the remedy.
    """
    for problem in _problems(facts, shapes, tp_size, blocks):
        raise ConfigError(problem)


def _problems(
    facts: ModelFacts, shapes: OperatorShapes, tp_size: int, blocks: int
) -> Iterator[str]:
    if shapes.delta and max(tp_size, blocks) > 1:
        yield (
            f"--sglang-tp-size={tp_size} --row-parallel-blocks={blocks}: layers of linear attention "
            "keep their states whole, and no rank has a part of them. Use --sglang-tp-size 1 and leave "
            "the blocks out."
        )
    for problem in _problems_of_plan(facts) if blocks > 1 else ():
        yield (
            f"--row-parallel-blocks={blocks}: {problem}. Use --sglang-tp-size 1 and leave the blocks "
            "out."
        )
    counts = {f"heads={kind.heads}": kind.heads for kind in shapes.attention}
    counts |= {f"kv_heads={kind.kv_heads}": kind.kv_heads for kind in shapes.attention}
    for name, count in counts.items():
        if count % tp_size:
            yield (
                f"--sglang-tp-size={tp_size}: does not divide {name}, which ranks share "
                "equally (SGLang's transformers backend keeps no copies). Choose a divisor."
            )
    inner = {f"in_features={k}": k for _, k, _ in shapes.row_linear}
    inner |= {f"moe_intermediate_size={i}": i for _, i, _, _ in shapes.experts}
    for name, size in inner.items():
        if size % blocks:
            yield (
                f"--row-parallel-blocks={blocks}: does not divide {name} of a row-parallel layer, "
                "whose sums are made of that many equal blocks. Choose a power of two that does, and "
                "tensor-parallel degrees up to it."
            )


def _problems_of_plan(facts: ModelFacts) -> Iterator[str]:
    model, model_type = facts.model, f"model_type={facts.config.model_type}"
    if not facts.config.base_model_tp_plan:
        yield (
            f"{model_type} has no base_model_tp_plan, so nothing says which of its layers tensor "
            "parallelism cuts"
        )
    if styles := unknown_styles(model):
        yield (
            f"the plan of {model_type} calls layers {', '.join(styles)}, and SGLang's transformers "
            "backend cannot share them out"
        )
    if classes := whole_attention(model):
        yield (
            f"the plan of {model_type} leaves {', '.join(classes)} whole, and SGLang's transformers "
            "backend shares the heads"
        )
    if classes := fused_experts(model):
        yield (
            f"a checkpoint of {model_type} holds all experts of a layer in one tensor "
            f"({', '.join(classes)}), gate beside up, and an engine's ranks load parts of single "
            "experts alone"
        )
