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
    "int3_group128": (1, 128),
    "mxfp4": (1, 32),
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


def test_mxfp4_has_ocps_scales_and_e2m1s_numbers():
    near = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -2.6, 0.0]
    numbers, scale = quantise(torch.tensor([near, [x / 8 for x in near]]), "mxfp4")
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -3.0, 0.0]
    assert numbers.tolist() == [expected, expected]
    assert scale.tolist() == [[1.0], [0.125]]


def test_nvfp4_has_e4m3_scales_and_one_of_the_whole_matrix():
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(2))
    weight[3, :16] = 0
    numbers, scale = quantise(weight, "nvfp4")
    outer = 6 * 448 / weight.abs().max()
    inner = scale * outer
    assert torch.equal(inner.to(torch.float8_e4m3fn).float() / outer, scale)
    assert scale.shape == (40, 3) and inner.max() == 448 and not numbers[3, :16].any()
    assert set(numbers.abs().unique().tolist()) == {0, 0.5, 1, 1.5, 2, 3, 4, 6}
    assert ((round_weight(weight, "nvfp4") - weight).abs() <= weight.abs().max() / 4).all()
    largest = weight.abs().argmax() // 48
    rest = round_weight(weight[20:] if largest < 20 else weight[:20], "nvfp4")
    whole = round_weight(weight, "nvfp4")
    assert not torch.equal(rest, whole[20:] if largest < 20 else whole[:20])


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
