"""Functions and products of few rows, to the bits of many."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.ops.base import Operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu.gemms import FewRows, FewSummed, Gemms, add_products
from onpolicy.ops.cpu.layout import whole_vectors
from onpolicy.ops.cpu.linear import tiled_linear
from onpolicy.ops.cpu.rows import NUMBERS
from onpolicy.ops.cpu.threads import PiecePool

ROWS, SIZE = 70, 20011


def arguments(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, SIZE, generator=generator).to(dtype)
    temperature = torch.full((ROWS, 1), 0.7)
    targets = torch.arange(ROWS) * 311 % SIZE
    grad = torch.randn(ROWS, generator=generator)
    return logits, temperature, targets, grad


def calls(dtype):
    """Every function and its arguments."""
    logits, temperature, targets, grad = arguments(dtype)
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    uniform = torch.linspace(0, 0.999, ROWS, dtype=torch.float64)
    return {
        "log_softmax": (logits, temperature),
        "gather_log_probs": (logits, temperature, targets),
        "grad_logits": (logits, temperature, targets, grad),
        "grad_logits of entropy": (logits, temperature, targets, grad, grad.flip(0)),
        "sample": (log_probs, uniform),
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["gather_log_probs", "grad_logits", "grad_logits of entropy", "sample"]
)
def test_pieces_have_the_bits_of_the_whole(name, dtype, threads):
    operators, inputs = CpuOperators(threads), calls(dtype)[name]
    method = name.split()[0]
    got, want = getattr(operators, method)(*inputs), getattr(Operators, method)(operators, *inputs)
    got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, want))
    assert all(map(torch.equal, got, want))


def test_log_softmax_is_torchs():
    logits, temperature, *_ = arguments()
    want = torch.log_softmax(logits / temperature, dim=-1)
    for threads in (1, 3):
        with torch.no_grad():
            assert torch.equal(CpuOperators(threads).log_softmax(logits, temperature), want)


class Made(TorchDispatchMode):
    """The sizes of all tensors that operations make in memory of their own."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.sizes.append(result.numel())
        return result


@pytest.mark.parametrize("name", [*calls(torch.bfloat16)])
def test_only_the_result_is_as_large_as_the_logits(name):
    inputs = calls(torch.bfloat16)[name]
    with torch.no_grad(), Made() as made:
        getattr(CpuOperators(), name.split()[0])(*inputs)
    results = int(name not in ("gather_log_probs", "sample"))
    assert sum(size > NUMBERS for size in made.sizes) == results


@pytest.mark.parametrize("size", [1, 127, 128, 20011, 128 * 157])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_an_exponential_in_place_has_the_bits_of_one_elsewhere(size, offset):
    x = 4 * torch.randn(size + offset, generator=torch.Generator().manual_seed(1))
    want = whole_vectors(torch.exp, x[offset:].clone())
    assert torch.equal(CpuOperators().elementwise(torch.exp_, x[offset:]), want)


class Library:
    """Every row by itself; of fewer rows than `narrow`, and of `bad` rows, the last is an ulp off."""

    def __init__(self, narrow: int = 1, bad: int = 0):
        self.narrow, self.bad = narrow, bad
        self.rows: list[int] = []

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.rows.append(len(x))
        out = torch.cat([F.linear(row, weight, bias) for row in x.split(1)])
        if len(x) < self.narrow or len(x) == self.bad:
            out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
        return out

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the aligned linear makes of it, after the shape has been tried."""
        gemms = Gemms(PiecePool(1), product=self.product)
        tiled_linear(gemms, x, weight, bias)
        self.rows.clear()
        return tiled_linear(gemms, x, weight, bias)


@pytest.mark.parametrize(
    ("narrow", "bad", "expected"),
    [(1, 0, 4), (4, 0, 4), (5, 0, 8), (1, 12, 8), (9, 0, 16), (16, 0, 16)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_has_as_few_rows_as_give_the_bits_of_sixteen(narrow, bad, expected, has_bias):
    library = Library(narrow, bad)
    assert FewRows(16, library.product).multiple(40, 24, has_bias) == expected


@pytest.mark.parametrize(("narrow", "computed"), [(4, 4), (8, 8), (16, 16)])
def test_a_row_alone_is_padded_to_what_was_found(narrow, computed):
    """Of whole numbers, whose sums no order changes: a tile has fewer columns than the whole."""
    x, weight, bias = (torch.randint(-9, 10, s).float() for s in ((16, 24), (600, 24), (600,)))
    library = Library(narrow)
    alone = library.multiply(x[:1], weight, bias)
    assert set(library.rows) == {computed}
    assert torch.equal(alone, Library().product(x, weight, bias)[:1])


def test_one_tile_of_columns_that_needs_sixteen_rows_decides_for_all():
    class WideTilesDiffer(Library):
        def product(self, x, weight, bias):
            out = super().product(x, weight, bias)
            return out + (len(x) < 16 and len(weight) == 512)

    library = WideTilesDiffer()
    library.multiply(torch.randn(3, 24), torch.randn(600, 24))
    assert set(library.rows) == {16}


def test_a_transposed_weight_and_blocks_of_k_keep_sixteen():
    gemms = Gemms(PiecePool(1), product=Library().product)
    weight = torch.randn(32, 32)
    assert gemms.row_multiple(1, weight, False, torch.float32) == 4
    assert gemms.row_multiple(1, weight.t(), False, torch.float32) == 16
    assert gemms.row_multiple(1, weight, False, torch.float32, blocks=2) == 16
    assert gemms.row_multiple(1, weight, False, torch.bfloat16) == 16


@pytest.mark.parametrize("count", range(1, 16))
def test_few_rows_have_the_bits_of_many_with_the_library_that_is_here(count):
    gemms = Gemms(PiecePool(1))
    x, weight = torch.randn(40, 200), torch.randn(700, 200)
    assert torch.equal(
        tiled_linear(gemms, x[:count], weight, None), tiled_linear(gemms, x, weight, None)[:count]
    )


def widely(sums, weights, rows):
    """As a library sums that halves the rows: zeros at the end move the cut."""
    half = weights.shape[1] // 2
    for part in (slice(half), slice(half, None)):
        add_products(sums, weights[:, part], rows[:, part])


@pytest.mark.parametrize(("sum_into", "expected"), [(add_products, 16), (widely, 64)])
def test_a_sum_over_few_rows_leaves_out_zeros_only_where_they_add_nothing(sum_into, expected):
    assert FewSummed(16, 64, sum_into).multiple(64, 32, 48) == expected


def test_one_size_that_needs_whole_blocks_decides_for_all():
    def sum_into(sums, weights, rows):
        (widely if rows.shape[-1] == 48 else add_products)(sums, weights, rows)

    assert FewSummed(16, 64, sum_into).multiple(64, 32) == 16
    assert FewSummed(16, 64, sum_into).multiple(64, 32, 48) == 64
