"""Four ways to multiply: does a row keep its bits among few and many rows, and how long does it take?

    python -m benchmarks.gpu_quarter.gemm_paths

The shapes are the joint linears of Qwen3-4B and its head. cuBLAS as it comes is the negative control:
where it keeps its rows too, nothing was shown. cuBLASLt without a workspace, which has nothing to
split K with, reads its settings once and so has a process of its own. A line is written for every
shape.

`--compile` has DeepGEMM compile its kernels for these shapes, in several processes, and ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.gpu_ops.cases import DEVICE, calls_of, normal, rotating
from benchmarks.gpu_ops.timing import alternate
from benchmarks.gpu_quarter.result_lines import Line, claim_output, write_line
from onpolicy.compat.process import prepare_process
from onpolicy.contract import NO_SPLIT_K
from onpolicy.ops.hopper.cublaslt import forbid_split_k
from tests.support.gpu.operators import make_gpu_operators, make_part
from tests.support.gpu.shapes import QWEN3_4B, TINY, ModelShape
from tests.support.violations import few_rows_differ

Product = Callable[[Tensor, Tensor], Tensor]

CUBLAS, CUBLASLT = "cublas", "cublaslt"
PATHS = (CUBLAS, "triton", "deep_gemm")
"""The paths that are measured in turns in one process; CUBLASLT is in another."""

ROWS = (1, 2, 7, 8, 16, 33, 64, 100, 128, 256, 512, 1000, 1024, 4096, 8192)
TIMED = (1, 8, 64, 256, 1024, 8192)
FEW = 40
"""The most rows of a rehearsal."""
HEAD_ROWS = 1024
"""The most rows of the head: both engines compute logits of few rows at a time."""
SECONDS = 0.1
"""Seconds of measuring for each number of rows; making the operands comes on top."""


def make_products(paths: Sequence[str], write: Callable[[Line], None]) -> dict[str, Product]:
    """Return the paths that work here; say of each other one why not."""
    products: dict[str, Product] = {}
    for path in paths:
        try:
            products[path] = _product(path)
        except Exception as error:  # the others still have something to say
            write({"path": path, "error": f"{type(error).__name__}: {error}"[:300]})
    return products


def _product(path: str) -> Product:
    if DEVICE == "cpu":  # a rehearsal
        from onpolicy.ops.cpu import CpuOperators

        operators = few_rows_differ() if path == CUBLAS else CpuOperators()
        return partial(operators.linear, bias=None)
    if path == CUBLASLT:
        forbid_split_k()
    if path in (CUBLAS, CUBLASLT):
        return lambda x, weight: torch.mm(x, weight.t())
    make = make_gpu_operators if path == "triton" else make_part
    return partial(make(path).linear, bias=None)


def differing(product: Product, x: Tensor, weight: Tensor, rows: Sequence[int]) -> list[int]:
    """Return the numbers of rows at which the first or the last rows of `x` have other bits than
    among all."""
    whole = product(x, weight)
    return [
        m
        for m in rows
        if not torch.equal(product(x[:m], weight), whole[:m])
        or not torch.equal(product(x[-m:], weight), whole[-m:])
    ]


def _microseconds(
    products: dict[str, Product], m: int, n: int, k: int, l2_bytes: int
) -> dict[str, float]:
    sets = rotating(lambda i: (normal(m, k, seed=i), normal(n, k, seed=i, scale=k**-0.5)), l2_bytes)
    seconds = alternate(calls_of(products, sets), len(sets), SECONDS * len(products))
    return {path: 1e6 * s for path, s in seconds.items()}


@torch.no_grad()
def measure(
    products: dict[str, Product], model: ModelShape, most: int, write: Callable[[Line], None]
) -> None:
    """Write a line for each shape and path: where bits differ, and times by the number of rows."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 0
    for name, (n, k) in model.joint_linears().items():
        limit = min(most, HEAD_ROWS) if name == "lm_head" else most
        rows, timed = ([m for m in some if m <= limit] for some in (ROWS, TIMED))
        x, weight = normal(rows[-1], k, seed=1), normal(n, k, scale=k**-0.5)
        bits: dict[str, list[int]] = {}
        for path, product in products.items():
            try:
                bits[path] = differing(product, x, weight, rows[:-1])
            except Exception as error:  # of this path at this shape
                write({"path": path, "linear": name, "error": f"{error}"[:300]})
        kept = {path: products[path] for path in bits}
        times = {m: _microseconds(kept, m, n, k, l2_bytes) for m in timed}
        for path in kept:
            took = {str(m): round(times[m][path], 2) for m in timed}
            where = {"path": path, "linear": name, "out": n, "in": k}
            write(where | {"differing_rows": bits[path], "of": rows, "microseconds": took})


def _compile(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    with torch.no_grad():
        _product("deep_gemm")(normal(m, k), normal(n, k))


def compile_all(model: ModelShape, most: int, processes: int, write: Callable[[Line], None]) -> int:
    """Have DeepGEMM compile what `measure` and engines call; return the number of failures."""
    shapes = [(m, n, k) for m in reversed(ROWS) for n, k in model.joint_linears().values()]
    shapes = [shape for shape in shapes if shape[0] <= most]
    failed = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {shape: pool.submit(_compile, shape) for shape in shapes}
        for shape, future in futures.items():
            if error := future.exception():
                failed.append(f"{shape}: {error}"[:200])
    write({"compiled": len(shapes) - len(failed), "failed": failed[:5]})
    return len(failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a path or a compilation failed."""
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", type=int, metavar="PROCESSES", help="compile, and end")
    parser.add_argument("--paths", default=",".join((CUBLASLT, *PATHS)), help="commas between")
    args = parser.parse_args(argv)
    paths = args.paths.split(",")
    output = claim_output()
    write = partial(write_line, output)
    model, most = (TINY, FEW) if DEVICE == "cpu" else (QWEN3_4B, ROWS[-1])
    if args.compile:
        return int(bool(compile_all(model, most, args.compile, write)))
    code = 0
    if CUBLASLT in paths and len(paths) > 1:
        own = [sys.executable, "-m", "benchmarks.gpu_quarter.gemm_paths", "--paths", CUBLASLT]
        code = subprocess.run(own, env=os.environ | NO_SPLIT_K, stdout=output).returncode
        paths.remove(CUBLASLT)
    products = make_products(paths, write)
    measure(products, model, most, write)
    return int(bool(code) or len(products) < len(paths))


if __name__ == "__main__":
    sys.exit(main())
