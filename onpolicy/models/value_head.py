"""A critic: a policy model with one value per token in the place of its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.ops import Operators


class Values(NamedTuple):
    """The values of the requested tokens, from a critic's forward pass."""

    values: Tensor
    """float32 [R]: expected return of each token and all after it, given the tokens before it."""


class ValueHead(nn.Linear):
    """A value head, [..., H] -> float32 [...], by an operator that does not round the result.

    It starts at zero: the first advantages are the plain returns, and it draws no random numbers.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None):
        super().__init__(hidden_size, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero, and draw nothing from torch's generator."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, operators: Operators, hidden: Tensor) -> Tensor:
        """Compute float32 [R] from hidden states [R, H]."""
        return operators.partial_linear(hidden, self.weight)[:, 0] + self.bias.float()


class ValueModel(PolicyModel):
    """A causal LM without its output projection that returns values."""

    def __init__(self, causal_lm: PreTrainedModel, operators: Operators):
        super().__init__(causal_lm, operators)
        head = causal_lm.get_output_embeddings()
        name = next(name for name, child in causal_lm.named_children() if child is head)
        setattr(causal_lm, name, nn.Identity())
        self.value_head = ValueHead(head.weight.shape[1])

    def forward(self, batch: PackedTokens) -> Values:  # type: ignore[override]
        """Compute the value of each requested token, at the position that predicts it."""
        return Values(self.value_head.values(self.operators, self.hidden_states(batch)))
