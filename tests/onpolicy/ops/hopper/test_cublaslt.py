"""Products by cuBLASLt: how PyTorch is called, and orders of sums that the self-check must find.

PyTorch has this product on GPUs alone. The stand-in checks what its GPU code checks, and sums in the
order that a test asks for.
"""

import pytest
import torch
from torch import library

from onpolicy.errors import ContractError
from onpolicy.ops.checks import self_check
from onpolicy.ops.checks.fixed_numbers import check_rows, probe
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.hopper import CublasLtOperators, cublaslt, gemm
from onpolicy.ops.row_parallel import WHOLE, RowParallel, tree_sum
from onpolicy.ops.triton import TritonOperators

N, K = 512, 9728


class StandIn:
    """The product on a CPU; K is cut into `parts(M)` sums, which are added."""

    def __init__(self):
        self.calls = []
        self.parts = lambda rows: 1
        self.differs_alone = None
        """The number of a row that has other bits in a call of its own."""
        self._sums = CpuOperators(2)

    def __call__(self, x, columns, out_dtype, *, out):
        assert (
            x.dtype == columns.dtype and out.dtype == out_dtype
        )  # aten/src/ATen/native/cuda/Blas.cpp
        assert out_dtype in (x.dtype, torch.float32)
        assert out.shape == (len(x), columns.shape[1]) and out.is_contiguous()
        self.calls.append((x, columns))
        pairs = zip(*(m.chunk(self.parts(len(x)), 1) for m in (x, columns.t())), strict=True)
        result = sum(self._sums.partial_linear(*pair) for pair in pairs)
        if self.differs_alone is not None and len(x) == 1:
            most = max((seen for seen, _ in self.calls), key=len)
            result *= 1 + 2.0**-6 * torch.equal(x[0], most[self.differs_alone])
        return out.copy_(result)


@pytest.fixture
def product():
    stand_in, replaced = StandIn(), library.Library("aten", "IMPL")
    replaced.impl("mm.dtype_out", stand_in, "CPU")
    yield stand_in
    replaced._destroy()


@pytest.fixture
def operators(product):
    return CublasLtOperators.__new__(CublasLtOperators)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


VIEWS = {
    "whole": lambda m: random(m, 64),
    "columns of a wider matrix": lambda m: random(m, 192)[:, 64:128],
    "columns off a 16-byte boundary": lambda m: random(m, 192)[:, 3:67],
    "every second row": lambda m: random(2 * m, 64)[::2],
    "one row for all": lambda m: random(1, 64).expand(m, 64),
    "transposed": lambda m: random(64, m).t(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_one_row_is_given_in_the_layout_of_many(product, view):
    weight = random(32, 64)
    for rows in (1, 2, 9):
        x, out = view(rows), torch.empty(rows, 32)
        cublaslt.multiply(x, weight, out)
        torch.testing.assert_close(out, x.float() @ weight.float().t())
        (given, columns) = product.calls[-1]
        # PyTorch tells cuBLASLt that a single row's stride is K (_cublasAdjustLdLevel3).
        assert given.stride(1) == 1 and given.stride(0) >= 64 and given.data_ptr() % 16 == 0
        assert rows == 1 or given.stride(0) == 64
        assert columns.data_ptr() == weight.data_ptr()


def test_a_transposed_weight_is_not_copied(product):
    weight, out = random(64, 32), torch.empty(4, 32, dtype=torch.bfloat16)
    cublaslt.multiply(random(4, 64), weight.t(), out)
    assert product.calls[-1][1].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("has_bias", [False, True])
def test_results_and_gradients_are_those_of_a_linear(operators, has_bias):
    inputs = [random(2, 5, 64), random(32, 64), random(32)][: 3 if has_bias else 2]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out = operators.linear(*ours)
    want = torch.nn.functional.linear(*(x.float() for x in theirs)).bfloat16()
    assert torch.equal(out, want)
    for result in (out, want):
        result.backward(random(2, 5, 32))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_blocks_are_added_along_the_tree(operators, product):
    x, weight = random(9, 256), random(32, 256)
    with torch.no_grad():
        got = operators.row_parallel_linear(x, weight, None, RowParallel(4))
    pairs = zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)
    want = tree_sum([CpuOperators().partial_linear(*pair) for pair in pairs]).bfloat16()
    assert torch.equal(got, want) and len(product.calls) == 4


def test_a_weight_with_an_odd_size_is_multiplied_by_triton(operators, product):
    x, weight = random(5, 64), random(24, 64)
    with torch.no_grad():
        got = operators.linear(x, weight)
        assert torch.equal(got, TritonOperators().linear(x, weight)) and not product.calls


def test_pytorch_is_told_to_forbid_split_k(monkeypatch):
    told, matmul = [], torch.backends.cuda.matmul
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", told.append)
    before = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    try:
        cublaslt.forbid_split_k()
        assert told == ["cublaslt"]
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_bf16_reduced_precision_reduction_split_k
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch has cuBLASLt")
def test_a_pytorch_without_cublaslt_is_refused():
    with pytest.raises(RuntimeError, match="not been compiled with cuBLASLt"):
        cublaslt.forbid_split_k()


ORDERS = {
    # A kernel for one row, which PyTorch avoids on GPUs of 10.0 and newer alone.
    "one row": lambda rows: 2 if rows == 1 else 1,
    "few rows": lambda rows: 4 if rows < 128 else 1,
    # TransformerEngine's issue 2986: on an L20 33 rows were as one, and these were not.
    "some numbers of rows": lambda rows: 2 if rows in (2, 17, 128, 257, 1024) else 1,
    # 1 and 2, 3 and 4 ... rows have one order.
    "many orders": lambda rows: 1 << (rows.bit_length() // 2 % 3),
}


@pytest.mark.parametrize("order", [None, *ORDERS])
def test_the_self_check_refuses_rows_whose_bits_depend_on_their_number(
    operators, product, monkeypatch, order
):
    """On a GPU's way through the self-check, with as few rows as it ever takes."""
    monkeypatch.setattr(self_check, "probe", lambda *shape, seed, device: probe(*shape, seed=seed))
    monkeypatch.setattr(self_check, "MAX_NUMBERS", 1)
    product.parts = ORDERS.get(order, product.parts)
    if (
        order == "one row"
    ):  # whose sums bfloat16 may hide by luck: a row that the first does not show
        product.differs_alone = 5

    def check():
        given = N, K, False, WHOLE, torch.bfloat16, "cuda", 0
        with torch.no_grad():
            return self_check._check_linear(operators, *given)

    if order is None:
        assert len(check()) == 300
        return
    with pytest.raises(ContractError, match=rf"operator=linear, shape=\({N}, {K}\).*row-invariant"):
        check()


def test_one_row_in_bfloat16_hides_another_order_that_float32_shows(operators, product):
    product.parts = ORDERS["one row"]
    weight = probe(N, K, seed=5).div_(K**0.5).bfloat16()
    x = probe(300, K, seed=7).bfloat16()
    with torch.no_grad():
        check_rows("linear", (N, K), lambda rows: operators.linear(rows, weight), x, (1, 2))
        with pytest.raises(ContractError, match="case='1 rows'"):
            check_rows(
                "partial", (N, K), lambda rows: operators.partial_linear(rows, weight), x, (1,)
            )


def test_a_tail_of_k_that_a_kernel_leaves_out_for_few_rows_is_found(operators, monkeypatch):
    """Split-K of cuBLASLt 12.8 and 13.1 does on some shapes; of ones, every result is K."""
    ones, right = torch.ones(300, 1032).bfloat16(), gemm.in_blocks

    def without_tail(multiply, x, weight, *rest):
        end = 1024 if len(x) < 16 else None
        return right(multiply, x[:, :end], weight[:, :end], *rest)

    monkeypatch.setattr(gemm, "in_blocks", without_tail)
    with torch.no_grad(), pytest.raises(ContractError, match="case='1 rows': 16 of 16"):
        check_rows(
            "linear", (16, 1032), lambda x: operators.partial_linear(x, ones[:16]), ones, (1,)
        )
