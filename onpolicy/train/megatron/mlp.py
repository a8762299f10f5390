"""A dense MLP in place of Megatron's, whose activation and product are separate steps."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor, nn

from onpolicy.train.megatron.config import AlignedConfig
from onpolicy.train.megatron.linears import AlignedColumnLinear, WholeLinear, last_linear


class AlignedMLP(MLP):
    """Two linears, and between them `Operators.gated`, as in the rollout."""

    config: AlignedConfig

    def __init__(self, config: AlignedConfig, size: int | None = None):
        """size: the intermediate one, if it is another than that of the model's dense layers."""
        sized = copy.copy(config)  # Megatron takes the second linear's size from here alone
        sized.ffn_hidden_size = size or config.ffn_hidden_size
        super().__init__(
            sized,
            MLPSubmodules(linear_fc1=AlignedColumnLinear, linear_fc2=last_linear(config)),
            ffn_hidden_size=sized.ffn_hidden_size,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )
        for module in self.modules():
            module.config = config  # the one that other operators are put into

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, H] -> the same; under sequence parallelism this rank's tokens."""
        assert self.config.operators is not None
        gate, up = self.linear_fc1(hidden_states)[0].chunk(2, dim=-1)
        hidden = self.config.operators.gated(self.config.activation, gate, up)
        return self.linear_fc2(hidden)[0], None


class WholeMLP(nn.Module):
    """An MLP that every tensor-parallel rank holds whole, for the tokens that are there."""

    def __init__(self, config: AlignedConfig, size: int):
        super().__init__()
        self.config = config
        self.linear_fc1 = WholeLinear(config, config.hidden_size, 2 * size)
        self.linear_fc2 = WholeLinear(config, size, config.hidden_size)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """[T, 1, H] -> the same."""
        assert self.config.operators is not None
        gate, up = self.linear_fc1(hidden_states).chunk(2, dim=-1)
        hidden = self.config.operators.gated(self.config.activation, gate, up)
        return self.linear_fc2(hidden), None
