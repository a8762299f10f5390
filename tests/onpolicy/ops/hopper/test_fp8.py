"""Products of bytes by DeepGEMM: which bytes and scales, in which layouts, and what decides a row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.hopper import gemm
from onpolicy.ops.hopper.gemm import input_in_bytes, weight_in_bytes
from onpolicy.ops.row_parallel import RowParallel
from onpolicy.weights.rounding import FP8, quantise, round_weight
from tests.support.bytes_on_cpu import OfRounded, stand_in
from tests.support.recorded_kernels import FP8_GEMM_NT

M, N, K = 9, 256, 512
WEIGHTS, INPUTS = "fp8_e4m3_block128", "fp8_e4m3"


@pytest.fixture(params=FP8_GEMM_NT)
def calls(request, monkeypatch):
    return stand_in(monkeypatch, request.param)


@pytest.fixture
def operators(calls):
    return OfRounded(1)


def numbers(*shape, seed=0):
    """Rows, and blocks of a weight, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-9, 9, (shape[0], 1), generator=generator)
    return (torch.randn(*shape, generator=generator) * sizes).bfloat16()


def rounded_input(seed=1, rows=M):
    return round_weight(numbers(rows, K, seed=seed), INPUTS)


def rounded_weight(seed=2, rows=N):
    return round_weight(numbers(rows, K, seed=seed) / K, WEIGHTS)


@given(exponent=st.integers(-90, 90), seed=st.integers(0, 999), rows=st.sampled_from([1, 128, 200]))
@pytest.mark.parametrize("number_format", [WEIGHTS, INPUTS])
def test_rounding_what_was_rounded_gives_the_same_numbers_and_scales(
    number_format, exponent, seed, rows
):
    """So bytes need not travel: bfloat16 is 2^-9 close, and FP8 numbers are 2^-4 apart. And a block's
    largest number was bfloat16 before, so it is the same one again."""
    once = (numbers(rows, 256, seed=seed).double() * 2.0**exponent).bfloat16()
    first = quantise(once, number_format)
    again = quantise(round_weight(once, number_format), number_format)
    assert all(map(torch.equal, first, again))


def test_bytes_and_scales_are_those_of_the_rounding(operators):
    x, weight = numbers(M, K), numbers(N, K)
    for made, number_format, whole in (
        (input_in_bytes(x), INPUTS, x),
        (weight_in_bytes(weight), WEIGHTS, weight),
    ):
        values, scales = quantise(whole, number_format)
        assert made.numbers.dtype == FP8 and torch.equal(made.numbers.float(), values)
        assert torch.equal(made.scales, scales.expand_as(made.scales))


def test_a_weight_of_many_rows_is_made_part_by_part(monkeypatch):
    weight = numbers(3 * 128, 256)
    whole = weight_in_bytes(weight)
    monkeypatch.setattr(gemm, "ROWS_AT_A_TIME", 128)
    parts = weight_in_bytes(weight)
    assert torch.equal(whole.numbers.float(), parts.numbers.float())
    assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_of_what_bytes_and_scales_amount_to(operators, calls, out_dtype):
    """The stand-in checks what DeepGEMM asks of types, layouts and scales."""
    x, weight = rounded_input(), rounded_weight()
    product = operators.linear if out_dtype == torch.bfloat16 else operators.partial_linear
    with torch.no_grad():
        got = product(x, weight)
    assert got.dtype == out_dtype and len(calls) == 1
    x, weight = (
        (made.numbers.double(), made.scales.double())
        for made in (input_in_bytes(x), weight_in_bytes(weight))
    )
    exact = (x[0] * x[1].repeat_interleave(128, 1)) @ (
        weight[0] * weight[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
    ).t()
    bound = torch.finfo(out_dtype).eps * exact.abs() + 2**-20 * exact.abs().amax(1, keepdim=True)
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("row_parallel", [RowParallel(1), RowParallel(4)], ids=["whole", "blocks"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_depends_on_nothing_but_itself(operators, row_parallel, has_bias):
    x = torch.cat([rounded_input(seed) for seed in (1, 2, 3)])
    weight, bias = rounded_weight(), numbers(N, 1)[:, 0] if has_bias else None

    def linear(x):
        return operators.row_parallel_linear(x, weight, bias, row_parallel)

    with torch.no_grad():
        whole = linear(x)
        for rows in (slice(0, 1), slice(1, 2), slice(3, 10), slice(0, 27, 2)):
            assert torch.equal(linear(x[rows]), whole[rows])
        assert torch.equal(linear(x.flip(0)), whole.flip(0))
        assert torch.equal(linear(x.view(3, 9, K)), whole.view(3, 9, N))


def test_columns_are_the_same_alone_beside_others_and_on_any_rank(operators):
    """Joint linears and tensor-parallel shards, in whole blocks of 128."""
    x, one, two = rounded_input(), rounded_weight(3), rounded_weight(4, 128)
    with torch.no_grad():
        together = operators.linear(x, torch.cat((one, two)))
        assert torch.equal(together[:, :N], operators.linear(x, one))
        assert torch.equal(together[:, N:], operators.linear(x, two))
        assert torch.equal(together[:, 128:N], operators.linear(x, one[128:]))
        half = operators.linear(x, torch.cat((one[:64], two)))  # a block that two weights share
        assert not torch.equal(half[:, 64:], operators.linear(x, two))


def test_a_bias_is_added_before_the_one_rounding(operators):
    x, weight, bias = rounded_input(), rounded_weight(), numbers(N, 1)[:, 0]
    with torch.no_grad():
        exact = operators.partial_linear(x, weight) + bias.float()
        assert torch.equal(operators.linear(x, weight, bias), exact.bfloat16())
        twice = operators.linear(x, weight) + bias
        assert not torch.equal(twice, exact.bfloat16())


def test_gradients_are_those_of_the_rounded_numbers_and_the_forward_pass_is_that_of_an_engine(
    operators,
):
    rows = 16  # with fewer, a library may add in another order for each caller
    inputs = [rounded_input(rows=rows), rounded_weight(), numbers(N, 1)[:, 0]]
    with torch.no_grad():
        engines = operators.linear(*inputs)
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    grad = numbers(rows, N, seed=5)
    out = operators.linear(*ours)
    out.backward(grad)
    torch.nn.functional.linear(*theirs).backward(grad)
    assert torch.equal(out, engines)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_held_bytes_follow_the_weight_in_the_memory_that_they_lie_in(operators, calls):
    """As an engine does it, whose CUDA graphs read there."""
    x, weight, new = rounded_input(), rounded_weight(), rounded_weight(7)
    with torch.no_grad():
        fresh = operators.linear(x, weight), operators.linear(x, new)
        operators.hold([weight])
        assert torch.equal(operators.linear(x, weight), fresh[0])
        held = calls[-1].b[0].data_ptr()
        weight.copy_(new)
        assert torch.equal(operators.linear(x, weight), fresh[0])  # nobody said so
        operators.hold([weight])
        assert torch.equal(operators.linear(x, weight), fresh[1])
        assert calls[-1].b[0].data_ptr() == held
        assert torch.equal(operators.linear(x, weight[:128]), fresh[1][:, :128])  # not the held one
