"""What an engine has fused is still what it computes with after every push."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.errors import ContractError
from onpolicy.models.align import AlignedLinear
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE
from sglang_patches import fusion, registry


class Attention(nn.Module):
    """Three linears of one input, and SGLang's way to load their weights."""

    def __init__(self):
        super().__init__()
        for name, size in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4)):
            linear = AlignedLinear(nn.Linear(12, size), CpuOperators(1), WHOLE)
            setattr(self, name, linear)

    def load_weights(self, weights, *, in_place=True):
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            if in_place:
                parameter.data.copy_(tensor)
            else:
                parameter.data = tensor
        return {name for name, _ in weights}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(registry, "report", {})
    monkeypatch.setattr(fusion, "is_plain", lambda module: isinstance(module, AlignedLinear))
    model = Attention()
    runner = SimpleNamespace(
        model=model,
        server_args=SimpleNamespace(enable_weights_cpu_backup=False),
        memory_saver_adapter=SimpleNamespace(region=lambda *_, **__: nullcontext()),
    )
    fusion.fuse(runner, CpuOperators(1))
    assert registry.report["fusion"]["joint_linears"] == 1
    return model


@torch.no_grad()
def test_a_push_is_what_joint_linears_compute_with(model):
    x, pushed = torch.randn(5, 12), torch.randn(4, 12)
    assert model.load_weights([("k_proj.weight", pushed)]) == {"k_proj.weight"}
    k_proj = model.k_proj
    assert torch.equal(k_proj(x), CpuOperators(1).linear(x, pushed, k_proj.bias))


@torch.no_grad()
def test_a_push_that_a_joint_product_would_not_see_is_refused(model):
    x, pushed = torch.randn(5, 12), torch.randn(4, 12)
    before = model.k_proj(x)
    with pytest.raises(ContractError, match="memory of its own"):
        model.load_weights([("k_proj.weight", pushed)], in_place=False)
    assert torch.equal(model.k_proj(x.clone()), before)  # which is why
