"""Gives SGLang's transformers backend the head of a sequence classifier.

Diverges in stock SGLang: the backend leaves `score.weight` out without a word, and answers /classify
with the last hidden state, divided by its norm; SGLang's own classes of Qwen2 and Qwen3 have a bias,
which no checkpoint of transformers fills. Here the answer is what transformers' classifier says
of the last token, in float32, by the operator of the trainer's critics.
Source: EmbeddingMixin, sglang/srt/models/transformers.py. Can go when the backend loads the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onpolicy.ops import Operators
from sglang_patches import registry

TARGET = "sglang.srt.models.transformers.EmbeddingMixin.__init__"


def install(operators: Operators) -> None:
    class Head(nn.Module):
        """In the place of SGLang's pooler."""

        def __init__(self, score: nn.Linear):
            super().__init__()
            self._score = [score]  # which is the model's already

        def forward(self, hidden_states: torch.Tensor, forward_batch: Any) -> Any:
            from sglang.srt.layers.pooler import (
                EmbeddingPoolerOutput,
                PoolingType,
                pool_hidden_states,
            )

            last = pool_hidden_states(PoolingType.LAST, hidden_states, forward_batch)
            weight = self._score[0].weight
            return EmbeddingPoolerOutput(operators.partial_linear(last.to(weight.dtype), weight))

    def add_head(result: Any, model: Any, *_: Any, **__: Any) -> Any:
        config = model.text_config
        if model.pooler is not None and config.num_labels == 1:
            model.classifier = nn.Linear(config.hidden_size, 1, bias=False)
            model.pooler = Head(model.classifier)
        return result

    registry.hook(TARGET, add_head, "after")
