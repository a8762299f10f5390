"""Rendering of the record of `benchmarks.gpu_quarter` as a page.

python -m benchmarks.gpu_quarter.quarter_page gpu_quarter.jsonl
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from benchmarks.gpu_ops.report import summary, table
from benchmarks.gpu_quarter.result_lines import Line, read_lines

LAYERS = 36
"""Layers of Qwen3-4B, whose step is extrapolated."""


def page(lines: Sequence[Line]) -> str:
    """Return Markdown: how each item ended, and what it measured."""
    blocks = ["# A quarter of an hour on a GPU"]
    if any(line.get("rehearsal") for line in lines):
        blocks.append("**A rehearsal on a CPU: its numbers say nothing about a GPU.**")
    machines = (line["machine"].items() for line in lines if "machine" in line)
    blocks += [", ".join(f"{name} {value}" for name, value in machine) for machine in machines]
    blocks.append(table(["item", "outcome", "seconds"], _outcomes(lines)))
    found = {name: [*part(_of(lines, name))] for name, part in PARTS.items()}
    for name, part_blocks in found.items():
        blocks += [f"## {name}", *part_blocks] if part_blocks else []
    return "\n\n".join(blocks) + "\n"


def _of(lines: Sequence[Line], name: str) -> list[Line]:
    return [line for line in lines if line.get("item") == name]


def _outcomes(lines: Sequence[Line]) -> Iterator[list[Any]]:
    """Yield the last outcome of each item that began; a cut one has none."""
    last: dict[str, Line] = {}
    for line in lines:
        if "started" in line or "outcome" in line:
            last[line["item"]] = line
    for name, line in last.items():
        yield [name, line.get("outcome", "cut"), line.get("seconds", "")]


def _gemm(lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        if "error" in line:
            yield f"{line['path']} {line.get('linear', '')} failed: {line['error']}"
    measured = [line for line in lines if "differing_rows" in line]
    if not measured:
        return
    yield "Rows whose bits depend on how many others there are, and microseconds by rows:"
    yield table(
        ["linear", "out x in", "path", "differs at", "microseconds"],
        [
            [
                line["linear"],
                f"{line['out']:,} x {line['in']:,}",
                line["path"],
                ", ".join(map(str, line["differing_rows"])) or "none",
                ", ".join(f"{m}: {us:,.1f}" for m, us in line["microseconds"].items()),
            ]
            for line in measured
        ],
    )
    if not any(line["differing_rows"] for line in measured if line["path"] == "cublas"):
        yield (
            "**The negative control does not differ: cuBLAS keeps its rows too, so this shows "
            "nothing.**"
        )


def extrapolated(shallow: Line, deep: Line, name: str, layers: int = LAYERS) -> float:
    """Return milliseconds of a model of `layers` layers, on the straight line through two depths."""
    a, b = shallow["layers"], deep["layers"]
    per_layer = (deep[name] - shallow[name]) / (b - a)
    return float(shallow[name] + (layers - a) * per_layer)


def _decode(lines: Sequence[Line]) -> Iterator[str]:
    cells: dict[tuple[int, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if "step_ms" in line:
            cells[line["context_len"], line["batch_size"]][line["kind"]].append(line)
    rows = [
        [batch, context, *row]
        for (context, batch), kinds in sorted(cells.items())
        for row in _kinds(kinds)
    ]
    if rows:
        yield (
            f"Milliseconds of a decoding step of {LAYERS} layers, from two depths; `over stock` is "
            "speed. Beside a number: `eager` if no CUDA graph was replayed, `disturbed` if another "
            "engine was still loading."
        )
        yield table(["batch", "context", "engine", "step", "forward", "over stock"], rows)
    for line in lines:
        if "error" in line:
            yield f"{line['kind']} failed:\n\n" + indent(line["error"].strip(), "    ")


def _kinds(kinds: dict[str, list[Line]]) -> Iterator[list[str]]:
    steps = {}
    for kind, lines in kinds.items():
        shallow, *others = sorted(lines, key=lambda line: line["layers"])
        deep = [line for line in others if line["layers"] > shallow["layers"]]
        if not deep:
            yield [kind, f"depth {shallow['layers']} alone", "", ""]
            continue
        pair = (shallow, deep[-1])
        step, forward = (extrapolated(*pair, name) for name in ("step_ms", "forward_ms"))
        doubts = "" if all(line["is_captured"] for line in pair) else " eager"
        doubts += "" if all(line["is_alone"] for line in pair) else " disturbed"
        steps[kind] = (step, f"{step:.2f}{doubts}", f"{forward:.2f}")
    for kind, (step, *shown) in steps.items():
        ratio = f"{steps['stock'][0] / step:.2f}" if "stock" in steps else ""
        yield [kind, *shown, ratio]


def _record(lines: Sequence[Line]) -> Line:
    records = [line["record"] for line in lines if "record" in line]
    return records[-1] if records else {}


def _operators(lines: Sequence[Line]) -> Iterator[str]:
    if record := _record(lines):
        yield summary(record)


def _step(lines: Sequence[Line]) -> Iterator[str]:
    for step in _record(lines).get("by_num_tokens", []):
        sides = ", ".join(f"{kind} {step[kind]['seconds']:.3f} s" for kind in ("aligned", "stock"))
        yield f"{step['num_tokens']} tokens: {sides}; aligned over stock {step['ratio']:.2f}."


def _tests(lines: Sequence[Line]) -> Iterator[str]:
    if record := _record(lines):
        yield ", ".join(f"{count} {outcome}" for outcome, count in record["outcomes"].items())
        for name, test in record["tests"].items():
            if test["outcome"] not in ("passed", "skipped"):
                yield f"- `{name}`: {test.get('reason', '')}"


def _engines(lines: Sequence[Line]) -> Iterator[str]:
    rows = [
        [
            line["name"],
            line["exit_code"],
            f"{line['num_mismatched_tokens']} of {line['num_compared_tokens']}",
            line["seconds"],
        ]
        for line in lines
        if "name" in line
    ]
    if rows:
        yield table(["engine", "exit code", "mismatched tokens", "seconds"], rows)


PARTS = {
    "gemm": _gemm,
    "decode": _decode,
    "operators": _operators,
    "step": _step,
    "tests": _tests,
    "engines": _engines,
}

if __name__ == "__main__":
    print(page(read_lines(Path(sys.argv[1]))))
