"""Which linear layers tensor parallelism cuts along K, and which models it can cut at all.

Hugging Face configurations carry a plan, `base_model_tp_plan`, and SGLang's transformers backend cuts
by it. Layers that sum over a K which ranks share must sum in the same order in an engine without
tensor parallelism, so the plan is read here exactly as SGLang reads it.
Source: sglang/srt/models/transformers.py, TransformersBase.recursive_replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import OperatorShapes
from onpolicy.errors import ConfigError

ROWWISE = {
    "rowwise",
    "rowwise_rep",
    "rowwiseparallel",
    "packed_rowwise",
    "local_rowwise",
    "local_packed_rowwise",
}
"""Styles of a plan under which SGLang gives each rank a part of K."""


def row_parallel_linears(model: PreTrainedModel) -> set[nn.Linear]:
    """The linears of a causal LM whose K the model's plan shares out."""
    plan = {
        "model." + re.sub(r"^(\^?)model(\\?)\.", r"\1", pattern): style.lower().replace("-", "_")
        for pattern, style in (model.config.base_model_tp_plan or {}).items()
    }

    def style(name: str) -> str | None:
        return next((plan[pattern] for pattern in plan if re.match(pattern, f"model.{name}")), None)

    return {
        module
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear) and style(name) in ROWWISE
    }


def require_shardable(
    config: PretrainedConfig, shapes: OperatorShapes, *, tp_size: int, blocks: int
) -> None:
    """Refuse a model that `tp_size` ranks cannot share, or whose sums `blocks` cannot cut.

    Raises ConfigError that names the size, the rule and the remedy.
    """
    for problem in _problems(config, shapes, tp_size, blocks):
        raise ConfigError(problem)


def _problems(
    config: PretrainedConfig, shapes: OperatorShapes, tp_size: int, blocks: int
) -> Iterator[str]:
    if blocks > 1 and not config.base_model_tp_plan:
        yield (
            f"--row-parallel-blocks={blocks}: model_type={config.model_type} has no "
            "base_model_tp_plan, so nothing says which of its layers tensor parallelism cuts. Use "
            "--sglang-tp-size 1 and leave the blocks out."
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
