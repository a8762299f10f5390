"""Routes the output projection to the aligned linear.

Diverges in stock SGLang: a plain `torch.matmul`. SGLang also pads the vocabulary to a multiple of
64 rows and drops their logits afterwards, so on one rank only the model's own rows are multiplied.
With tensor parallelism every rank multiplies its equal part, SGLang gathers the logits, and the
padding is in the last parts; a logit does not depend on the others.
Source: LogitsProcessor._compute_lm_head, sglang/srt/layers/logits_processor.py. Can go with linear.py.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"


def install(operators: Operators) -> None:
    def compute_lm_head(
        self: Any,
        hidden_states: torch.Tensor,
        lm_head: Any,
        embedding_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight = lm_head.weight[: lm_head.org_vocab_size]
        return operators.linear(hidden_states.to(weight.dtype), weight, embedding_bias)

    registry.hook(TARGET, compute_lm_head, "replace")
