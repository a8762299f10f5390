"""An example beside TRL's GRPOTrainer, in turns: seconds to the start, to the end, and per step.

    python -m benchmarks.beside_trl --json OUT.json                                  # the quickstart
    python -m benchmarks.beside_trl --example smollm2 --steps 4 --rounds 2 --json OUT.json

`benchmarks/beside_trl.md` says what is compared, and what was expected before it was measured. TRL has
an environment of its own under --work, which is made once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from benchmarks.processor_seconds import Watch
from onpolicy.outputs.directory import versions
from onpolicy.outputs.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch==2.13.0", "trl==1.16.0")
WARM_UP = 2
"""Steps that no median is of."""

QUICKSTART, SMOLLM2 = EXAMPLES = ("quickstart", "smollm2")

FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    QUICKSTART: {"onpolicy": {"dtype": "float32"}, "onpolicy_bfloat16": {"dtype": "bfloat16"}},
    SMOLLM2: {
        "onpolicy": {"dtype": "bfloat16"},
        "onpolicy_cpu": {"dtype": "bfloat16", "operators": "cpu"},
        "stock": {"dtype": "bfloat16", "operators": "auto", "true_on_policy_mode": False},
    },
}
"""Flags of each side that runs `onpolicy train`, over those of the example's config.yaml."""

TRL = "trl"
PARTS = ("rollout_time", "rollout_tokens_per_second", "train_time", "weight_sync_time")
NUMBERS = (
    "seconds", "first_rollout_seconds", "step_seconds", "processor_seconds", "processor_seconds_a_step",
)  # fmt: skip


def trl_python(work: Path, pip_args: list[str]) -> Path:
    """Return the Python of TRL's environment, which is created if it is not complete."""
    venv = work / "trl"
    python, complete = venv / "bin/python", venv / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *pip_args, *PACKAGES]
        subprocess.run(install, check=True)
        complete.touch()
    return python


def run_onpolicy(
    example: str, given: dict[str, Any], inputs: Path, steps: int, directory: Path
) -> dict[str, Any]:
    """Run an example with other flags and without its evaluations; return the times of its lines, and
    its rewards."""
    directory.mkdir(parents=True)
    flags = yaml.safe_load((ROOT / "examples" / example / "config.yaml").read_text())
    kept = {name: value for name, value in flags.items() if not name.startswith("eval")}
    config, run = directory / "config.yaml", directory / "run"
    config.write_text(yaml.safe_dump({**kept, "num_rollout": steps, **given}))
    command = [
        sys.executable, "-m", "onpolicy.cli", "train", "--custom-config-path", str(config),
        "--hf-checkpoint", str(inputs / "model"), "--prompt-data", str(inputs / "data.jsonl"),
        "--run-dir", str(run),
    ]  # fmt: skip
    with Watch(command, {"OMP_WAIT_POLICY": "PASSIVE"}, directory / "log.txt") as watch:
        ends = [stamp for stamp, line in watch.lines() if line.startswith("rollout ")]
    metrics = [x for x in read_jsonl(run / "metrics.jsonl") if "perf/step_time" in x]
    after = ("perf/train_time", "perf/weight_sync_time")
    return {
        **watch.record(),
        "first_rollout": ends[0] - sum(metrics[0][name] for name in after),
        "ends": ends,
        "parts": [{name: round(x[f"perf/{name}"], 3) for name in PARTS} for x in metrics],
        "rewards": [x["rollout/raw_reward"] for x in metrics],
        "mismatched_tokens": sum(x["parity/num_mismatched_tokens"] for x in metrics),
        "compared_tokens": sum(x["parity/num_compared_tokens"] for x in metrics),
    }


def run_trl(
    python: Path, example: str, inputs: Path, steps: int, directory: Path
) -> dict[str, Any]:
    """Run `benchmarks/trl_side.py` as a user of TRL starts it: with the defaults of its libraries."""
    directory.mkdir(parents=True)
    out = directory / "trl.json"
    script = str(ROOT / "benchmarks/trl_side.py")
    command = [str(python), script, example, str(inputs), str(steps), str(out)]
    with Watch(command, {"HF_HUB_OFFLINE": "1"}, directory / "log.txt") as watch:
        for _ in watch.lines():
            pass
    return {**watch.record(), **json.loads(out.read_text())}


def summed_up(side: str, found: dict[str, Any], watch_from: float) -> dict[str, Any]:
    """Return the measurements of a run, from the command on."""
    ends, seconds = found["ends"], found["processor_seconds"]
    steps = [b - a for a, b in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    before, after = np.interp([ends[WARM_UP - 1], ends[-1]], *zip(*seconds, strict=True))
    return {
        "side": side,
        "seconds": found["ended"] - watch_from,
        "first_rollout_seconds": found["first_rollout"] - watch_from,
        "step_seconds": median(steps),
        "steps": [round(step, 3) for step in steps],
        "processor_seconds": seconds[-1][1],
        "processor_seconds_a_step": float(after - before) / len(steps),
        "load": found["load"],
        "rewards": [round(x, 3) for x in found["rewards"]],
        **{n: found[n] for n in found if n.endswith("_tokens") or n in ("versions", "parts")},
    }


def processor() -> str:
    """Return the processor's model name, as Linux reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--example", choices=EXAMPLES, default=QUICKSTART)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", type=Path, default=ROOT / "runs/beside_trl")
    parser.add_argument("--pip-args", nargs="*", default=[], help="for installing torch and TRL")
    asked = parser.parse_args()
    if asked.steps <= WARM_UP:
        parser.error(f"--steps={asked.steps}: must be more than {WARM_UP}, which are left out")
    work, example = asked.work.absolute(), asked.example
    inputs, sides = work / example, FLAGS[example]
    python = trl_python(work, asked.pip_args)
    prepare = str(ROOT / "examples" / example / "prepare.py")
    subprocess.run([sys.executable, prepare, str(inputs)], check=True)
    runs = []
    for number in range(asked.rounds):
        for side in (*sides, TRL):
            directory, started = work / f"{time.time():.0f}_{number}_{side}", time.time()
            found = (
                run_onpolicy(example, sides[side], inputs, asked.steps, directory)
                if side in sides
                else run_trl(python, example, inputs, asked.steps, directory)
            )
            runs.append(summed_up(side, found, started))
            print(json.dumps(runs[-1]), flush=True)
            asked.json.write_text(json.dumps(record(runs), indent=1) + "\n")


def record(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs, and medians of each side over its rounds."""
    medians = {
        side: {name: median(run[name] for run in runs if run["side"] == side) for name in NUMBERS}
        for side in {run["side"] for run in runs}
    }
    machine = {"processor": processor(), "cores": os.cpu_count()}
    return {"machine": machine, "versions": versions(), "medians": medians, "runs": runs}


if __name__ == "__main__":
    main()
