"""The aligned operators beside the stock ones they replace, in turns in one run, on one GPU.

    python -m benchmarks.gpu_ops --seconds 300 [--only linear,attention] [--models Qwen3-4B]

The record is rewritten after every case, so a run that is cut short leaves what it has measured.
`--rehearse` measures a few small cases of CPU operators, where there is no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_ops import attention, linears, rowwise
from benchmarks.gpu_ops.attention import attention_cases
from benchmarks.gpu_ops.cases import DEVICE, Case
from benchmarks.gpu_ops.linears import expert_cases, linear_cases, row_parallel_cases
from benchmarks.gpu_ops.report import count_goals, describe, line, markdown
from benchmarks.gpu_ops.rowwise import rowwise_cases
from benchmarks.gpu_ops.timing import alternate
from onpolicy.compat.process import prepare_process
from onpolicy.ops import Operators
from onpolicy.ops.cpu import CpuOperators
from tests.support.gpu.machine import describe_machine, write_json
from tests.support.gpu.operators import BACKENDS, make_gpu_operators, missing
from tests.support.gpu.shapes import MODELS, QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B, TINY

SECONDS_PER_CASE = 0.5
"""Seconds of measuring; making the operands and compiling kernels come on top."""


def make_cases(only: list[str], models: list[str]) -> list[Case]:
    """Return cases of every kind in turns, so that a short run covers some of each."""
    kinds: list[Iterable[Case]] = [
        linear_cases(QWEN3_4B),
        attention_cases(QWEN3_4B),  # Qwen3-8B has the same heads
        rowwise_cases(QWEN3_4B),
        linear_cases(QWEN3_8B),
        expert_cases(QWEN3_30B_A3B),
        row_parallel_cases(QWEN3_4B),
        rowwise_cases(QWEN3_8B),
    ]
    rounds = itertools.zip_longest(*kinds)
    cases = [case for turn in rounds for case in turn if case is not None]
    return [case for case in cases if _is_chosen(case, only, models)]


def make_small_cases() -> list[Case]:
    """Return the cases of a rehearsal, whose sizes a CPU computes in seconds."""
    linears.ROW_COUNTS = rowwise.ROW_COUNTS = (1, 8)
    attention.DECODING, attention.PACKED = ((2, 64),), ((2, 32),)
    kinds = (linear_cases, row_parallel_cases, attention_cases, rowwise_cases)
    return [next(iter(kind(TINY))) for kind in kinds]


def _is_chosen(case: Case, only: list[str], models: list[str]) -> bool:
    named = [model for model in MODELS if model in case.where]
    return (not only or any(case.operator.startswith(prefix) for prefix in only)) and (
        not models or not named or any(model in models for model in named)
    )


def make_aligned(chosen: list[str]) -> tuple[dict[str, Operators], dict[str, str]]:
    """Return the operators of the backends that work on this machine, and the obstacle for each
    other one."""
    lacks = {backend: problem for backend in chosen if (problem := missing(backend))}
    return {name: make_gpu_operators(name) for name in chosen if name not in lacks}, lacks


def measure_ceilings(l2_bytes: int) -> dict[str, float]:
    """Return the speed of a large cuBLAS product and of a large copy: FLOP/s, bytes/s."""
    size, copied = (8192, max(1 << 30, 8 * l2_bytes)) if DEVICE == "cuda" else (256, 1 << 20)
    x, y = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(copied, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    calls = {"mm": lambda _: torch.mm(x, y), "copy": lambda _: target.copy_(source)}
    seconds = alternate(calls, 1, 1.0)
    return {
        "flops": 2.0 * size**3 / seconds["mm"],
        "bandwidth": 2.0 * source.nbytes / seconds["copy"],
    }


def run(
    cases: list[Case], aligned: dict[str, Operators], l2_bytes: int, end: float
) -> Iterator[dict[str, Any]]:
    """Yield the whole record after the ceilings, and again after every case; start none after
    `end`."""
    result: dict[str, Any] = {
        "what": "aligned operators and what they replace, medians of alternating bursts",
        "machine": describe_machine(),
        "ceilings": measure_ceilings(l2_bytes),
        "goals": count_goals([]),
        "cases": [],
        "failed": [],
        "not_measured": [],
    }
    yield result
    for number, case in enumerate(cases):
        if time.perf_counter() > end:
            result["not_measured"] = [_name(case) for case in cases[number:]]
            break
        try:
            calls, sets = case.make(aligned, l2_bytes)
            seconds = alternate(calls, sets, SECONDS_PER_CASE)
            result["cases"].append(describe(case, seconds, aligned, result["ceilings"]))
            print(f"[{number + 1}/{len(cases)}] {line(result['cases'][-1])}", flush=True)
        except Exception as error:
            # One kernel that does not run must not cost the others their numbers; see the exit code.
            result["failed"].append({"case": _name(case), "error": str(error)[:500]})
            print(f"[{number + 1}/{len(cases)}] {_name(case)} FAILED: {error}", flush=True)
        result["goals"] = count_goals(result["cases"])
        calls = {}  # frees the operands
        yield result
    yield result


def _name(case: Case) -> str:
    return f"{case.operator} M={case.rows} {case.where}"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, 1 if a case failed, 2 if nothing can be measured here."""
    prepare_process()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="start no case after these")
    parser.add_argument("--only", default="", help="operators by how they begin; commas between")
    parser.add_argument("--models", default="", help="models by name; commas between")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="aligned operators")
    parser.add_argument("--rehearse", action="store_true", help="a few cases, on a CPU")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu_ops.json"))
    args = parser.parse_args(argv)
    if args.rehearse:
        return write(run(make_small_cases(), {"cpu": CpuOperators()}, 0, math.inf), {}, args.json)
    if not torch.cuda.is_available():
        print(
            "benchmarks.gpu_ops measures kernels on a GPU, and torch finds none here "
            "(torch.cuda.is_available() is False). Run it on a machine with an NVIDIA GPU; on a CPU, "
            "`onpolicy bench step` and `onpolicy bench rollout` measure whole engines.",
            file=sys.stderr,
        )
        return 2
    end = time.perf_counter() + args.seconds
    aligned, lacks = make_aligned(_names(args.backends))
    for backend, problem in lacks.items():
        print(f"without {backend} operators: {problem}", flush=True)
    if not aligned:
        print("no aligned operators to measure", file=sys.stderr)
        return 2
    cases = make_cases(_names(args.only), _names(args.models))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return write(run(cases, aligned, l2_bytes, end), lacks, args.json)


def write(results: Iterator[dict[str, Any]], lacks: dict[str, str], file: Path) -> int:
    """Write every record that `run` yields and its page; return 1 if a case failed."""
    for result in results:
        result["missing"] = lacks
        write_json(file, result)
        file.with_suffix(".md").write_text(markdown(result))
    print(f"goals: {result['goals']}; {file} and {file.with_suffix('.md')}")
    return 1 if result["failed"] else 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
