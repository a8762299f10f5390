"""Norms and gated MLPs are recognised by what they compute, in any words, and replaced."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from onpolicy.models.align import (
    AlignedActivation,
    AlignedLinear,
    align_modules,
    is_gated_mlp,
    unaligned_modules,
)
from onpolicy.models.norms import NormKind, norm_kind, norm_kinds
from onpolicy.ops.cpu import CpuOperators

SIZE = 40
RMS = {
    "Qwen3": (Qwen3RMSNorm(SIZE, 1e-3), NormKind(False, 1e-3, 0.0, False)),
    "OLMo-2": (Olmo2RMSNorm(SIZE, 1e-3), NormKind(False, 1e-3, 0.0, True)),
    "Gemma-2": (Gemma2RMSNorm(SIZE, 1e-3), NormKind(False, 1e-3, 1.0, True)),
    "Llama-4, without weight": (Llama4TextL2Norm(1e-3), NormKind(False, 1e-3, 0.0, True)),
}
BY_POWER = {
    "Gemma-4": (Gemma4RMSNorm(SIZE, 1e-3), NormKind(False, 1e-3, 0.0, True)),
    "Gemma-4, without weight": (
        Gemma4RMSNorm(SIZE, 1e-3, with_scale=False),
        NormKind(False, 1e-3, 0.0, True),
    ),
}
CENTERED = {
    "Cohere": (CohereLayerNorm(SIZE, 1e-3), NormKind(True, 1e-3)),
    "OLMo": (OlmoLayerNorm(SIZE), NormKind(True, 1e-5)),
    "PyTorch": (nn.LayerNorm(SIZE, 1e-3), NormKind(True, 1e-3)),
    "PyTorch without bias": (nn.LayerNorm(SIZE, 1e-3, bias=False), NormKind(True, 1e-3)),
}


def with_weights(norm, dtype):
    for seed, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RMS, *BY_POWER, *CENTERED])
@torch.no_grad()
def test_a_norm_is_replaced_by_the_same_formula(name, dtype):
    norm, kind = (RMS | BY_POWER | CENTERED)[name]
    assert norm_kind(norm.bfloat16()) == norm_kind(norm.float()) == kind
    x = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    parent = nn.Sequential(with_weights(norm, dtype))
    want = norm(x)
    align_modules(parent, CpuOperators(1))
    assert type(parent[0]).__name__ == (
        "AlignedLayerNorm" if name in CENTERED else "AlignedRMSNorm"
    )
    assert parent[0](x).dtype == dtype
    if name in RMS:
        assert torch.equal(parent[0](x), want)
    else:  # another function for the root, or PyTorch's own kernel with sums in another order
        torch.testing.assert_close(parent[0](x), want)


@pytest.mark.parametrize(
    "norm", [Qwen3NextRMSNormGated(SIZE), nn.LayerNorm((2, SIZE)), nn.BatchNorm1d(SIZE)],
    ids=lambda norm: type(norm).__name__,
)  # fmt: skip
def test_a_norm_that_computes_something_else_is_named(norm):
    parent = nn.Sequential(norm)
    assert norm_kind(norm) is None
    assert unaligned_modules(parent, norm_kinds(parent)) == [type(norm).__name__]
    align_modules(parent, CpuOperators(1))
    assert parent[0] is norm


def test_a_module_with_parameters_that_no_one_knows_is_named():
    linear, embedding = nn.Linear(4, 4), nn.Embedding(4, 4)
    model = nn.Sequential(linear, embedding, nn.SiLU(), nn.Conv1d(4, 4, 3))
    assert unaligned_modules(model, norm_kinds(model)) == ["Conv1d"]


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
