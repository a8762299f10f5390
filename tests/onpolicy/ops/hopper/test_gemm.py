"""Products by DeepGEMM: how it is called, which layouts it is given, how a bias is rounded."""

import sys

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.ops.hopper import HopperOperators, gemm
from onpolicy.ops.machine import CudaToolkit
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.triton import TritonOperators
from tests.support.recorded_kernels import BF16_GEMM_NT, deep_gemm


@pytest.fixture(params=BF16_GEMM_NT)
def calls(request, monkeypatch):
    made = []
    module = deep_gemm(request.param, made)
    monkeypatch.setattr(gemm, "loaded", lambda: module)
    return made


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_every_version_is_called_as_it_wants_to_be(calls, out_dtype):
    x, weight = random(5, 64), random(32, 64)
    got = gemm.in_blocks(gemm.multiply, x, weight, None, out_dtype)
    assert torch.equal(got, (x.float() @ weight.float().t()).to(out_dtype))
    assert len(calls) == 1
    assert not hasattr(calls[0], "c")  # accumulating into an output takes another way through it


VIEWS = {
    "whole": lambda m: random(m, 64),
    "columns of a wider matrix": lambda m: random(m, 192)[:, 64:128],
    "columns off a 16-byte boundary": lambda m: random(m, 192)[:, 3:67],
    "rows of an odd stride": lambda m: random(m, 67)[:, :64],
    "every second row": lambda m: random(2 * m, 64)[::2],
    "one row for all": lambda m: random(1, 64).expand(m, 64),
    "transposed": lambda m: random(64, m).t(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_one_row_reaches_the_same_kernel_as_many(calls, view):
    """The stand-in checks what TMA asks; here: rows of unit stride, whatever their number."""
    weight = random(32, 64)
    for rows in (1, 2, 9):
        x = view(rows)
        got = gemm.in_blocks(gemm.multiply, x, weight, None, torch.float32)
        torch.testing.assert_close(got, x.float() @ weight.float().t())
        assert calls[-1].a.stride(1) == 1
        assert calls[-1].a.stride(0) >= 64
        assert calls[-1].b.stride() == (64, 1)


def test_a_row_that_pytorch_calls_contiguous_may_need_a_copy():
    row = random(3, 67)[1:2, :64]
    assert row.is_contiguous() and row.stride(0) == 67
    assert gemm.readable(row).stride(0) == 64


def test_what_can_be_read_is_not_copied(calls):
    wide, weight = random(4, 128), random(64, 32)
    gemm.in_blocks(gemm.multiply, wide[:, 64:], random(16, 64), None, torch.float32)
    assert calls[-1].a.data_ptr() == wide[:, 64:].data_ptr()
    # As the backward of log-probs has it.
    gemm.in_blocks(gemm.multiply, random(4, 64), weight.t(), None, torch.float32)
    assert calls[-1].b.data_ptr() == weight.data_ptr()
    assert calls[-1].b.stride() == (1, 32)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((16, 64), True), ((8, 64), False), ((24, 64), False), ((151936, 2560), True),
        ((64, 12), False),
    ],
)  # fmt: skip
def test_the_weights_shape_alone_decides_between_deep_gemm_and_triton(
    calls, monkeypatch, shape, fits
):
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert gemm.fits(weight) is fits
    if shape[0] > 64:
        return
    by_triton = []
    by_triton_instead = TritonOperators._product
    monkeypatch.setattr(
        TritonOperators,
        "_product",
        lambda self, *args: by_triton.append(args) or by_triton_instead(self, *args),
    )
    operators = HopperOperators.__new__(HopperOperators)
    with torch.no_grad():
        for rows in (1, 7, 64):
            operators.linear(random(rows, shape[1]), random(*shape))
            operators.partial_linear(random(rows, shape[1]), random(*shape))
    assert (len(calls), len(by_triton)) == ((6, 0) if fits else (0, 6))


def test_a_bias_is_added_before_the_one_rounding(calls):
    x, weight, bias = random(40, 64), random(32, 64), random(32)
    exact = x.float() @ weight.float().t() + bias.float()
    got = gemm.in_blocks(gemm.multiply, x, weight, bias, torch.bfloat16)
    assert torch.equal(got, exact.bfloat16())
    twice = (x.float() @ weight.float().t()).bfloat16() + bias
    assert not torch.equal(got, twice)  # SGLang's own way


@pytest.mark.parametrize("has_bias", [False, True])
def test_blocks_are_multiplied_where_they_lie_and_added_along_the_tree(calls, has_bias):
    x, weight, bias = random(9, 256), random(32, 256), random(32) if has_bias else None
    got = gemm.in_blocks(gemm.multiply, x, weight, bias, torch.bfloat16, blocks=4)
    places = [call.b.data_ptr() for call in calls]
    assert places == [block.data_ptr() for block in weight.chunk(4, 1)]
    blocks = zip(x.float().chunk(4, 1), weight.float().chunk(4, 1), strict=True)
    total = tree_sum([x @ weight.t() for x, weight in blocks])
    assert torch.equal(got, (total if bias is None else total + bias.float()).bfloat16())


def test_blocks_that_deep_gemm_cannot_read_are_tritons(calls):
    """Tensor-parallel ranks hold such blocks alone, so the whole must not be multiplied otherwise."""
    weight = random(32, 48)
    assert gemm.fits(weight) and gemm.fits(weight, 2)
    assert not gemm.fits(weight, 4) and not gemm.fits(weight[:, :12])
    operators = HopperOperators.__new__(HopperOperators)
    with torch.no_grad():
        operators.row_parallel_linear(random(5, 48), weight, None, RowParallel(4))
    assert not calls


def test_gradients_are_those_of_a_linear(calls):
    operators = HopperOperators.__new__(HopperOperators)
    inputs = [random(2, 5, 64), random(32, 64), random(32)]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    grad = random(2, 5, 32)
    operators.linear(*ours).backward(grad)
    torch.nn.functional.linear(*(x.float() for x in theirs)).backward(grad.float())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=2e-2)
    assert operators.partial_linear(inputs[0], inputs[1]).dtype == torch.float32


def test_the_batch_invariant_kernels_are_switched_on_where_there_is_a_switch(monkeypatch):
    for version in BF16_GEMM_NT:
        module = deep_gemm(version, [])
        monkeypatch.setitem(__import__("sys").modules, "deep_gemm", module)
        gemm.loaded.cache_clear()
        assert gemm.loaded() is module
        assert module.deterministic is version.startswith("0.2")
    gemm.loaded.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library may be there")
def test_a_library_that_cannot_be_loaded_is_named_with_a_remedy():
    with pytest.raises(
        ContractError, match=r"deep_gemm: cannot be loaded.*sgl-deep-gemm.*--operators"
    ):
        gemm.loaded()


def test_a_library_that_asserts_a_toolkit_is_refused_in_plain_words(monkeypatch, tmp_path):
    """As deep_gemm/cuda_helpers.py of sgl-deep-gemm 0.1.5 does, without a word."""
    package = tmp_path / "deep_gemm.py"
    package.write_text("cuda_home = None\nassert cuda_home is not None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gemm, "find_cuda_toolkit", lambda: CudaToolkit(None, "none is at PATH"))
    library = gemm.loaded.__wrapped__
    with pytest.raises(
        ContractError, match=r"CUDA toolkit, and none is at PATH\).*CUDA_HOME.*operators triton"
    ):
        library()
    package.write_text("assert 1 == 2, 'another assertion'\n")
    monkeypatch.setattr(gemm, "find_cuda_toolkit", lambda: CudaToolkit("/usr/local/cuda"))
    monkeypatch.setenv("CUDA_HOME", "")
    with pytest.raises(
        ContractError, match=r"\(another assertion\)\. Install the version of sgl-deep"
    ):
        library()


def test_deep_gemm_is_given_the_toolkit_that_was_found_when_it_is_imported(monkeypatch, tmp_path):
    (tmp_path / "deep_gemm.py").write_text("import os\nhome = os.environ['CUDA_HOME']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setattr(gemm, "find_cuda_toolkit", lambda: CudaToolkit("/packages/nvidia/cu13"))
    assert gemm.loaded.__wrapped__().home == "/packages/nvidia/cu13"
    monkeypatch.delitem(sys.modules, "deep_gemm")
