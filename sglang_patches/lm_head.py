"""Input embeddings and the output projection, computed and scaled as by the trainer.

Diverges in stock SGLang: logits are a plain `torch.matmul`, also of the rows that pad the vocabulary
to a multiple of 64; here only the model's own rows are multiplied, or with tensor parallelism each
rank's part. SGLang scales and caps logits by some names in the configuration, not by all, and rounds
in other places; here `onpolicy.models.logits` decides as for the trainer.
Source: LogitsProcessor._compute_lm_head, sglang/srt/layers/logits_processor.py. Can go with
engine_linears.py.

It multiplies input embeddings with their factor in float32, where transformers rounds it to the
dtype of the weights first. And it keeps the factor in no buffer, where model.py looks for it.
Source: replace_vocab_embed_class, sglang/srt/models/transformers.py. Can go when it rounds there
too.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from onpolicy.errors import ContractError
from onpolicy.models.align import scaled
from onpolicy.models.logits import logits_rule
from onpolicy.models.lora.adapters import CHILD
from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
EMBEDDING_TARGET = "sglang.srt.models.transformers.TransformersBase.replace_vocab_embed_class"


def install(operators: Operators) -> None:
    def compute_lm_head(
        self: Any,
        hidden_states: torch.Tensor,
        lm_head: Any,
        embedding_bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,  # from 0.5.23 on: memory that a result may be written into
    ) -> torch.Tensor:
        weight = lm_head.weight[: lm_head.org_vocab_size]
        bias = getattr(lm_head, "bias", embedding_bias)
        bias = None if bias is None else bias[: lm_head.org_vocab_size]
        hidden_states = hidden_states.to(weight.dtype)
        logits = operators.linear(hidden_states, weight, bias)
        if (adapter := lm_head._modules.get(CHILD)) is not None:
            logits = adapter(hidden_states, logits)
        finished: torch.Tensor = self.logits_rule.apply(operators, logits)
        return finished

    registry.hook(TARGET, compute_lm_head, "replace")
    registry.hook(EMBEDDING_TARGET, _after_replacement, "after")


def use_logits_rule(processor: Any, trainers: PreTrainedModel) -> None:
    """Have SGLang's logits processor treat logits as the trainer's model does."""
    rule = logits_rule(trainers)
    if rule is None:
        raise ContractError(
            f"architecture={type(trainers).__name__}: does something unknown to its logits, which the "
            "trainer would refuse. Install the trainer's version of transformers."
        )
    processor.logits_rule = rule
    processor.logit_scale = processor.final_logit_softcapping = None


def _after_replacement(result: Any, model: Any, *_: Any, **__: Any) -> Any:
    embedding = model.model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return result
    unscaled: Any = type(embedding).__mro__[1]

    class ScaledEmbedding(unscaled):
        def forward(self, input_: torch.Tensor) -> torch.Tensor:
            return scaled(super().forward(input_), self.embed_scale)

    embedding.__class__ = ScaledEmbedding
    del embedding.embed_scale
    embedding.register_buffer("embed_scale", scale, persistent=False)
    return result
