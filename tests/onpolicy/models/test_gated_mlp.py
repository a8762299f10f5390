"""Gated MLPs are recognised by what they compute, in whatever words."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from onpolicy.models.align import AlignedActivation, AlignedLinear, align_modules
from onpolicy.models.gated_mlp import is_gated_mlp
from onpolicy.ops.cpu import CpuOperators


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6), nn.Linear(8, 6)
        self.down_proj, self.act_fn = nn.Linear(6, 8), nn.SiLU()


class OtherWords(Mlp):
    def forward(self, hidden_states):
        up = self.up_proj(hidden_states)
        gate = self.gate_proj(hidden_states)
        inner = up * self.act_fn(gate)
        return self.down_proj(inner)


class PlainFunction(OtherWords):
    def __init__(self):
        super().__init__()
        del self.act_fn
        self.act_fn = torch.nn.functional.silu


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Limited(Mlp):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=100.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class Scaled(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


class Residual(Mlp):
    def forward(self, x):
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ActsAfterwards(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))


class ReadsWeights(Mlp):
    def forward(self, x):
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class TakesMore(Mlp):
    def forward(self, x, factor):
        return factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("kind", [OtherWords, PlainFunction])
def test_a_gated_mlp_is_one_operator_in_any_words(kind):
    class Counted(CpuOperators):
        calls = 0

        def gated(self, *args):
            self.calls += 1
            return super().gated(*args)

    mlp, operators, x = kind(), Counted(), torch.randn(5, 8)
    align_modules(nn.Sequential(mlp), operators)
    got, calls = mlp(x), operators.calls
    del mlp.forward
    if kind is PlainFunction:  # else PyTorch's, whose bits depend on where an element stands
        mlp.act_fn = partial(operators.elementwise, mlp.act_fn)
    assert torch.equal(got, mlp(x))
    assert calls == 1


@pytest.mark.parametrize(
    "kind", [Swapped, Limited, Scaled, Residual, ActsAfterwards, ReadsWeights, TakesMore, Mlp]
)
def test_another_mlp_stays(kind):
    mlp = kind()
    align_modules(nn.Sequential(mlp), CpuOperators())
    assert "forward" not in vars(mlp)


def test_the_probe_leaves_the_module_as_it_was():
    mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=6, num_attention_heads=1))
    before = dict(vars(mlp)), dict(mlp._modules)
    assert is_gated_mlp(mlp)
    assert (dict(vars(mlp)), dict(mlp._modules)) == before
    align_modules(nn.Sequential(mlp), CpuOperators())
    assert type(mlp.gate_proj) is AlignedLinear and type(mlp.act_fn) is AlignedActivation
