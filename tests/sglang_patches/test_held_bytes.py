"""The bytes that an engine's linears multiply are those of the weights of the last push."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.models.align import AlignedLinear
from onpolicy.models.rounded_inputs import round_inputs
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from onpolicy.weights.rounding import round_weight
from sglang_patches import engine_linears, fusion, registry
from sglang_patches.fusion import HeldBytes
from tests.support.bytes_on_cpu import BytesOnCpu, stand_in

WIDTH = 256
SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128, "o_proj": 256}


class Attention(nn.Module):
    """Three linears of one input and a row-parallel one, and SGLang's way to load their weights."""

    def __init__(self, operators):
        super().__init__()
        for name, size in SIZES.items():
            how = RowParallel(2) if name == "o_proj" else WHOLE
            made = AlignedLinear(nn.Linear(WIDTH, size, bias=False).bfloat16(), operators, how)
            setattr(self, name, made)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def pushed(seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            f"{name}.weight",
            round_weight(
                torch.randn(size, WIDTH, generator=generator).bfloat16(), "fp8_e4m3_block128"
            ),
        )
        for name, size in SIZES.items()
    ]


@pytest.fixture
def hooks(monkeypatch):
    found = {}
    monkeypatch.setattr(registry, "hook", lambda target, f, kind: found.setdefault(target, f))
    monkeypatch.setattr(registry, "report", {})
    monkeypatch.setattr(
        fusion, "is_plain", lambda m: isinstance(m, AlignedLinear) and m.row_parallel is WHOLE
    )
    return found


@torch.no_grad()
def results(model, x):
    return [getattr(model, name)(x) for name in SIZES]


@pytest.mark.parametrize("fuses", [True, False])
def test_a_push_renews_bytes_in_place_before_the_next_forward_pass(hooks, monkeypatch, fuses):
    calls = stand_in(monkeypatch)
    operators = BytesOnCpu()
    held, model, fresh = HeldBytes(operators), Attention(operators), Attention(operators)
    model.load_weights(pushed(1))
    region = SimpleNamespace(region=lambda *_, **__: nullcontext())
    runner = SimpleNamespace(
        model=model,
        server_args=SimpleNamespace(enable_weights_cpu_backup=False),
        memory_saver_adapter=region,
    )
    joint = fusion.fuse(runner, operators) if fuses else []
    assert len(joint) == fuses
    for each in (model, fresh):
        round_inputs(each, "fp8_e4m3", (AlignedLinear,))
    held.take(runner, joint)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        before = results(model, x)
        lay = {call.b[0].data_ptr() for call in calls[-2:]}
        model.load_weights(pushed(2))
        stale = results(model, x.clone())
        hooks[fusion.FORWARD_TARGET](runner, None)
        calls.clear()
        after = results(model, x.clone())
    assert all(map(torch.equal, stale, before))  # which is why
    assert {call.b[0].data_ptr() for call in calls[-2:]} == lay
    monkeypatch.setattr(operators, "_of_rounded", BytesOnCpu().of_rounded)  # holds nothing
    fresh.load_weights(pushed(2))
    assert all(map(torch.equal, after, results(fresh, x)))
    assert not torch.equal(after[0], before[0])


@torch.no_grad()
def test_sglangs_linears_multiply_bytes_where_they_read_rounded_inputs(hooks, monkeypatch):
    stand_in(monkeypatch)
    operators = BytesOnCpu()
    shapes = OperatorShapes(linear=(), attention=(), norm=(), vocab_size=1)
    contract = NumericsContract(backend="cpu", device="cpu", dtype="bfloat16", shapes=shapes)
    engine_linears.install(operators, contract)
    weight = pushed(1)[0][1]
    x = round_weight(torch.randn(3, WIDTH).bfloat16(), "fp8_e4m3")
    layer = SimpleNamespace(weight=weight)
    apply = hooks[engine_linears.TARGET]
    assert torch.equal(apply(None, layer, x), operators.linear(x, weight))
    layer.reads_rounded = True
    assert torch.equal(apply(None, layer, x), operators.of_rounded.linear(x, weight))
    assert not torch.equal(apply(None, layer, x), operators.linear(x, weight))
    row = SimpleNamespace(
        weight=weight, bias=None, skip_bias_add=False, input_size_per_partition=WIDTH
    )
    monkeypatch.setattr(engine_linears, "row_parallel", lambda _: RowParallel(2))
    monkeypatch.setattr(engine_linears, "own_part", lambda x, _: x)
    forward = hooks[engine_linears.ROW_TARGET]
    in_bfloat16 = forward(row, x)[0]
    row.reads_rounded = True
    in_bytes = operators.of_rounded.row_parallel_linear(x, weight, None, RowParallel(2))
    assert torch.equal(forward(row, x)[0], in_bytes)
    assert not torch.equal(in_bytes, in_bfloat16)
