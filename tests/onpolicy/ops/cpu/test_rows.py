"""Functions of rows of a vocabulary: in pieces of few rows, to the bits of all rows at once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.ops.base import Operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu.layout import exponentiate_, whole_vectors
from onpolicy.ops.cpu.rows import NUMBERS

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    got = exponentiate_(x[offset:])
    assert torch.equal(got, want)
    assert got.data_ptr() == x[offset:].data_ptr()
