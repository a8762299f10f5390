"""Cost of the aligned engines on a GPU: operators, servers, optimizer steps and pushes.

    python -m benchmarks.gpu_bench [--parts operators,decode,step,push] [--layers 12]

Each part is a command of its own, beside its baseline, on a model of random weights with the
sizes of a published one. The record and the page are rewritten after every part; a part that fails is
named with its last lines. The picture needs matplotlib: where that is missing, `--parts ''` draws it
later, elsewhere, from the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_page import draw, page
from benchmarks.random_checkpoint import GEOMETRIES
from tests.support.gpu.machine import describe_machine, write_json

LAST_LINES = 15
"""The last lines of a failed part's output that are kept."""


def commands(args: argparse.Namespace, model: Path, record: Path) -> dict[str, list[str]]:
    """Return the command of each part, which writes `record`."""
    onpolicy = [sys.executable, "-m", "onpolicy.cli", "bench"]
    common = ["--hf-checkpoint", str(model), "--json", str(record), "--repetitions", "3"]
    common += ["--run-dir", str(args.json.with_suffix(""))]
    contexts = ["--context-lens", *args.context_lens] if args.context_lens else []
    return {
        "operators": [
            sys.executable, "-m", "benchmarks.gpu_ops",
            "--seconds", str(args.seconds), "--json", str(record),
        ],
        "decode": [
            *onpolicy, "decode", *common, "--max-new-tokens", "64",
            "--batch-sizes", *args.batch_sizes, *contexts,
        ],
        "step": [*onpolicy, "step", *common, "--num-tokens", *args.num_tokens],
        "push": [
            sys.executable, "-m", "benchmarks.push", "--hf-checkpoint", str(model),
            "--json", str(record), "--repetitions", "3", "--bucket-mib", *args.bucket_mib,
        ],
    }  # fmt: skip


def run(args: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    """Measure the parts, write the record after each, and return it; earlier results of other parts
    stay."""
    result: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in parts:
        result |= {"machine": describe_machine(), "model": f"{args.geometry}, {args.layers} layers"}
        record = args.json.with_suffix("") / f"{name}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        command = commands(args, _model(args), record)[name]
        print(f"{name}: {' '.join(command)}", flush=True)
        result.setdefault("parts", {})[name] = _measured(command, record)
        write_json(args.json, result)
        args.json.with_suffix(".md").write_text(page(result))
    return result


def _measured(command: Sequence[str], record: Path) -> dict[str, Any]:
    record.unlink(missing_ok=True)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            print(line, end="", flush=True)
            lines.append(line)
    measured: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    if process.returncode:
        measured["error"] = f"exit code {process.returncode}: {''.join(lines[-LAST_LINES:])}"
    return measured


def _model(args: argparse.Namespace) -> Path:
    """Return the checkpoint, creating it if it is missing."""
    model: Path = args.models / f"{args.geometry}-{args.layers}-layers"
    if not (model / "config.json").exists():
        sizes = ["--geometry", args.geometry, "--layers", str(args.layers)]
        make = [sys.executable, "-m", "benchmarks.random_checkpoint", *sizes, str(model)]
        subprocess.run(make, check=True)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 1 if a part failed."""
    names = ("operators", "decode", "step", "push")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(names), help="commas between")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=12, help="of the model, for three servers")
    parser.add_argument("--models", type=Path, default=Path("runs"), help="where it is made")
    parser.add_argument("--seconds", type=float, default=300, help="of the operators")
    parser.add_argument("--batch-sizes", nargs="+", default=["1", "8", "64", "256"])
    parser.add_argument("--context-lens", nargs="+", default=[])
    parser.add_argument("--num-tokens", nargs="+", default=["8192"], help="of a step")
    parser.add_argument("--bucket-mib", nargs="+", default=["512", "2048"], help="of a push")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu_bench.json"))
    args = parser.parse_args(argv)
    parts = [part for part in args.parts.split(",") if part]
    if unknown := set(parts) - set(names):
        parser.error(f"--parts={args.parts}: no {', '.join(unknown)}. Give of {', '.join(names)}.")
    result = run(args, parts)
    print(page(result))
    if find_spec("matplotlib"):
        draw(result, args.json.with_suffix(".png"))
    return int(any("error" in result["parts"][part] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
