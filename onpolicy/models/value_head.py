"""A model that says of every token what is still to come: a policy with one number in the place of its
logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import Operators


class Values(NamedTuple):
    """What a critic's forward pass says of the tokens that are asked for."""

    values: Tensor
    """float32 [R]: by what comes before each, what it and all after it are expected to earn."""


class ValueHead(nn.Linear):
    """[..., H] -> float32 [...], by an operator that does not round it. It begins with zeros: the first
    advantages are what came, and no bit of a run is drawn."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None):
        super().__init__(hidden_size, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        """Zeros, and nothing of torch's generator."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, operators: Operators, hidden: Tensor) -> Tensor:
        """float32 [R] of hidden states [R, H]."""
        return operators.partial_linear(hidden, self.weight)[:, 0] + self.bias.float()


class ValueModel(PolicyModel):
    """A causal LM without its output projection, whose forward pass returns values."""

    def __init__(self, causal_lm: PreTrainedModel, operators: Operators):
        super().__init__(causal_lm, operators)
        head = causal_lm.get_output_embeddings()
        name = next(name for name, child in causal_lm.named_children() if child is head)
        setattr(causal_lm, name, nn.Identity())
        self.value_head = ValueHead(head.weight.shape[1])

    def forward(self, batch: PackedTokens) -> Values:  # type: ignore[override]
        """The value of each token asked for, at the position that predicts it."""
        return Values(self.value_head.values(self.operators, self.hidden_states(batch)))
