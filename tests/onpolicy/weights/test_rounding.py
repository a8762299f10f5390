"""Weights as a rollout in a small number format holds them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.weights.rounding import (
    FORMATS,
    dequantise,
    format_of_push,
    quantise,
    round_weight,
    rounded,
)
from tests.support.tiny_contract import CONTRACT

STEPS = {"int8": 127, "int4": 7, "int3": 3, "fp8_e4m3": 448}


def weights(seed, dtype=torch.float32):
    return torch.randn(5, 33, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", STEPS)
@given(seed=st.integers(0, 50))
def test_every_row_is_rounded_on_its_own_scale(weight_format, dtype, seed):
    weight = weights(seed, dtype)
    whole = round_weight(weight, weight_format)
    assert whole.dtype == dtype
    assert not torch.equal(whole, weight)
    rows = [round_weight(row[None], weight_format) for row in weight]
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("weight_format", ["int8", "int4", "int3"])
@given(seed=st.integers(0, 50))
def test_an_integer_format_holds_its_steps_and_a_rows_largest_exactly(weight_format, seed):
    weight, largest = weights(seed), STEPS[weight_format]
    result = round_weight(weight, weight_format)
    step = weight.abs().amax(1, keepdim=True) / largest
    assert torch.allclose(result / step, (result / step).round(), atol=1e-4)
    assert ((result / step).round().abs() <= largest).all()
    assert torch.allclose(result.abs().amax(1), weight.abs().amax(1))
    assert ((result - weight).abs() <= step / 2 * 1.001).all()


def test_fp8_has_three_bits_of_mantissa():
    weight = torch.tensor([[448.0, 17.0, 1.0625, 0.0]])
    assert round_weight(weight, "fp8_e4m3").tolist() == [[448.0, 16.0, 1.0, 0.0]]


def test_a_row_of_zeros_stays():
    assert torch.equal(round_weight(torch.zeros(2, 3), "int8"), torch.zeros(2, 3))


def test_only_linear_layers_are_rounded_and_without_a_format_nothing_is():
    weight = weights(0)
    bucket = [
        ("model.embed_tokens.weight", weight),
        ("lm_head.weight", weight),
        ("model.layers.0.mlp.gate.weight", weight),
        ("model.layers.0.mlp.shared_expert_gate.weight", weight),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", weight),
        ("model.layers.0.self_attn.q_proj.bias", weight[0]),
        ("model.norm.weight", weight[0]),
        ("transformer.wte.weight", weight),
        ("model.layers.0.block_sparse_moe.router.layer.weight", weight),
    ]
    (result,) = rounded([bucket], "int8")
    changed = [name for (name, new), (_, old) in zip(result, bucket, strict=True) if new is not old]
    assert changed == ["model.layers.0.mlp.experts.0.gate_proj.weight"]
    (same,) = rounded([bucket], "")
    assert all(new is old for (_, new), (_, old) in zip(same, bucket, strict=True))


def test_bf16_is_a_cast_and_back():
    ((_, result),) = next(rounded([[("a.weight", weights(1))]], "bf16"))
    assert torch.equal(result, weights(1).bfloat16().float())


BLOCKED = {
    "fp8_e4m3_block128": (128, 128),
    "int4_group128": (1, 128),
}


@pytest.mark.parametrize("weight_format", BLOCKED)
def test_a_block_is_rounded_on_its_own_and_the_last_may_be_smaller(weight_format):
    rows, columns = BLOCKED[weight_format]
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = round_weight(weight, weight_format)
    for first in range(0, 200, rows):
        for left in range(0, 300, columns):
            place = slice(first, first + rows), slice(left, left + columns)
            if rows > 1 or first % 97 == 0:
                assert torch.equal(round_weight(weight[place], weight_format), whole[place])
    cut = torch.cat([round_weight(part, weight_format) for part in weight.split(100, 1)], 1)
    assert not torch.equal(cut, whole)  # a group that ranks share must be rounded before


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_scales_are_the_rounded_weight(weight_format, dtype):
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    numbers, scale = quantise(weight, weight_format)
    again = dequantise(numbers, scale, weight_format, dtype)
    assert torch.equal(again, round_weight(weight, weight_format))
    scale[-1, -1] = torch.nextafter(scale[-1, -1], torch.tensor(torch.inf))
    if dtype == torch.float32:  # a bfloat16 product may be rounded to the same number
        assert not torch.equal(dequantise(numbers, scale, weight_format, dtype), again)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_rounded_weight_in_bfloat16_is_rounded_to_itself(weight_format):
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    once = round_weight(weight, weight_format)
    assert torch.equal(round_weight(once, weight_format), once) and not torch.equal(once, weight)


@pytest.mark.parametrize(
    ("changes", "asked", "expected"),
    [
        ({"backend": "stock", "device": "cuda"}, "fp8_e4m3", ""),
        ({"backend": "stock", "device": "cuda"}, "int4", "int4"),
        ({"backend": "stock"}, "fp8_e4m3", "fp8_e4m3"),
        ({"device": "cuda"}, "fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_stock_sglang_alone_makes_fp8_itself_and_on_gpus_alone(changes, asked, expected):
    assert format_of_push(replace(CONTRACT, **changes), asked) == expected
