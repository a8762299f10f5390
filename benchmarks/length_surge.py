"""Runs whose answers really grow, on an engine of 3 bits, under the length-decay schedule.

    python -m benchmarks.length_surge [--num-rollout 90] [--lr 1.5e-4 5e-4]

trains the quickstart's model, whose answers have four tokens, for answers of a hundred, once with each
learning rate, and writes lengths and schedules to benchmarks/results/length_surge.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from onpolicy.outputs.metrics import read_jsonl
from onpolicy.system import files

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/length_surge.json"
FLAGS = (
    "--rollout-weight-format", "int3", "--rollout-batch-size", "16", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "110", "--max-tokens-per-gpu", "4096", "--weight-decay", "0",
    "--advantage-estimator", "grpo", "--lr-warmup-steps", "5", "--lr-schedule", "length-decay",
    "--custom-rm-path", "benchmarks.length_surge.score",
)  # fmt: skip
CURVES = {
    "length": "rollout/response_length",
    "truncated": "rollout/truncated_ratio",
    "length_ratio": "lr_decay/length_ratio",
    "onset": "lr_decay/onset",
    "period": "lr_decay/period",
    "scale": "lr_decay/scale",
}


def score(sample: Any) -> float:
    """Return a response's reward: its length, up to 100 tokens."""
    return min(len(sample.response_ids), 100) / 100


def run(inputs: Path, directory: Path, lr: float, num_rollout: int) -> dict[str, Any]:
    flags = [*FLAGS, "--lr", f"{lr:g}", "--num-rollout", str(num_rollout)]
    data = ["--hf-checkpoint", str(inputs / "model"), "--prompt-data", str(inputs / "data.jsonl")]
    command = [sys.executable, "-m", "onpolicy.cli", "train", *data, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--run-dir", str(directory)], env=environment, check=True)
    records = [r for r in read_jsonl(directory / "metrics.jsonl") if CURVES["length"] in r]
    curves = {name: [round(r[metric], 3) for r in records] for name, metric in CURVES.items()}
    return {"flags": " ".join(flags), **curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-rollout", type=int, default=90)
    parser.add_argument("--lr", type=float, nargs="+", default=[1.5e-4, 5e-4])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        inputs = Path(made) / "inputs"
        prepare = [sys.executable, str(ROOT / "examples/quickstart/prepare.py"), str(inputs)]
        subprocess.run(prepare, check=True)
        runs = []
        for lr in asked.lr:
            runs.append(run(inputs, Path(made) / f"{lr:g}", lr, asked.num_rollout))
            files.write(RESULT, "[" + ",\n".join(map(as_json, runs)) + "]\n")


def as_json(record: dict[str, Any]) -> str:
    """Return JSON with a curve per line."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    return "{" + ",\n ".join(lines) + "}"


if __name__ == "__main__":
    main()
