"""Output projection by the aligned linear, and the model's own treatment of logits.

Diverges in stock SGLang: a plain `torch.matmul`. SGLang also pads the vocabulary to a multiple of
64 rows and drops their logits afterwards, so on one rank only the model's own rows are multiplied.
With tensor parallelism every rank multiplies its equal part, SGLang gathers the logits, and the
padding is in the last parts; a logit does not depend on the others.

SGLang scales and caps logits by some names in the configuration, not by all, and rounds in other
places; here `onpolicy.models.logits` decides as for the trainer, and SGLang leaves them unchanged.

Source: LogitsProcessor._compute_lm_head, sglang/srt/layers/logits_processor.py. Can go with
linear.py.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from onpolicy.errors import ContractError
from onpolicy.models.logits import logits_rule
from onpolicy.models.lora.adapters import CHILD
from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"


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
