"""Operators made to have the same bits everywhere: their order of sums, and what they gave elsewhere.

Whether another processor gives the same, only it can say: it runs these tests.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.config.groups import TrainerConfig
from onpolicy.errors import ContractError
from onpolicy.ops import portable
from onpolicy.ops.checks.fixed_numbers import probe
from onpolicy.ops.cpu.gemms import Gemms
from onpolicy.ops.cpu.linear import tiled_linear
from onpolicy.ops.cpu.threads import PiecePool
from onpolicy.training.fsdp.fsdp_optimizer import make_optimizer
from tests.support.golden import DIGESTS, bare_environment, digests_elsewhere, expected
from tests.support.instruction_sets import intel_kernels

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text(),
    reason="portable operators are those of x86-64 with AVX2",
)

ESTIMATES = {
    "sqrt", "sqrt_", "log2", "log2_", "log10", "log10_", "tan", "tan_", "atan", "atan_", "acos",
    "acos_", "asin", "asin_",
}  # fmt: skip
"""What MKL computes from the processor's own rcpps or rsqrtps under MKL_CBWR=COMPATIBLE; of float64 log
too (objdump -d libtorch_cpu.so of torch 2.13.0, its kernels for all processors, *_EXHAynn)."""


def settings(kernels, directory):
    if kernels == "of Intel":
        if shutil.which("cc") is None:
            pytest.skip("no C compiler, with which MKL is told of another processor")
        return {**intel_kernels(str(directory)), "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    return {}


@pytest.mark.parametrize(("threads", "kernels"), [(1, "as they come"), (2, "of Intel")])
def test_operators_gradients_and_optimizer_have_the_bits_of_every_other_machine(
    threads, kernels, tmp_path
):
    found, wanted = digests_elsewhere(threads, **settings(kernels, tmp_path)), expected()["digests"]
    assert {name for name in wanted if found.get(name) != wanted[name]} == set()
    assert found.keys() == wanted.keys()


def test_a_process_on_other_kernels_is_refused():
    without = DIGESTS.replace('\nuse_variables_of("portable")', "")
    command = [sys.executable, "-c", without, "1"]
    environment = bare_environment()
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode and "ContractError: backend=portable: MKL_CBWR=" in answer.stderr
    assert "use_variables_of('portable')" in answer.stderr


def numbers(*shape, seed=0):
    return torch.randint(-(2**14), 2**14, shape, generator=torch.manual_seed(seed)).float()


@pytest.mark.parametrize(("rows", "k", "columns"), [(16, 40, 16), (1, 700, 3), (19, 1500, 300)])
def test_a_product_is_summed_in_the_order_that_is_written_down(rows, k, columns):
    x, weight, bias = numbers(rows, k), numbers(columns, k, seed=1), numbers(columns, seed=2)
    wanted = portable.written_out(x[None], weight.t()[None], portable.BLOCK, fused=True)[0]
    assert torch.equal(portable.product(x, weight, None), wanted)
    assert torch.equal(portable.product(x, weight, bias), wanted + bias)
    tiled = tiled_linear(Gemms(PiecePool(1), product=portable.product), x, weight, bias)
    assert torch.equal(tiled, wanted + bias)
    other = portable.written_out(x[None], weight.t()[None], portable.BLOCK, fused=False)[0]
    assert not torch.equal(other, wanted)  # so one can tell


def test_another_order_is_refused(monkeypatch):
    product = portable.product

    def backwards(x, weight, bias):
        return product(x.flip(1), weight.flip(1), bias)

    monkeypatch.setattr(portable, "product", backwards)
    with pytest.raises(
        ContractError, match=r"16x512x256: \d+ of 4096 sums of oneDNN .*CBWR=COMPAT"
    ):
        portable.require_order()


def test_mkls_part_is_tried_too(monkeypatch):
    batched = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: batched(a.flip(2), b.flip(1)))
    with pytest.raises(ContractError, match=r"sums of MKL are not in the order"):
        portable.require_order()


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("portable", [True, False])
def test_the_optimizer_takes_no_estimate_of_the_processor(portable):
    weight = torch.nn.Parameter(probe(1003, seed=31))
    optimizer = make_optimizer([weight], TrainerConfig(), portable=portable)
    weight.grad = probe(1003, seed=32)
    with Called() as called:
        optimizer.step()
    estimated = called.names & ESTIMATES
    assert estimated == (set() if portable else {"sqrt"})


def test_a_parameter_is_updated_alike_wherever_it_stands():
    """In a shard of another rank it stands elsewhere, in a vector or behind the last whole one."""

    def learnt(part):
        weight = torch.nn.Parameter(probe(1003, seed=31)[part].clone())
        optimizer = make_optimizer([weight], TrainerConfig(), portable=True)
        for step in range(3):
            optimizer.param_groups[0]["lr"] = 1e-2
            weight.grad = probe(1003, seed=32 + step)[part].clone()
            optimizer.step()
        return weight.detach()

    whole = learnt(slice(None))
    for first in range(17):
        for last in (first + 1, first + 7, first + 100):
            assert torch.equal(learnt(slice(first, last)), whole[first:last])


def test_the_operators_of_other_backends_multiply_as_before():
    x, weight = probe(300, 700, seed=1), probe(20, 700, seed=2)
    gemms = Gemms(PiecePool(1))
    assert gemms.product is F.linear
    assert torch.equal(tiled_linear(gemms, x[:256], weight, None), _padded(x[:256], weight))


def _padded(x, weight):
    return F.linear(x, F.pad(weight, (0, 0, 0, 256 - len(weight))))[:, : len(weight)]
