"""Runs of the study of smollm2_study.md: does training differ where engines agree to the last bit?

    python -m benchmarks.smollm2_study [--only 'unsolvable-*' ...] [--hours H] [--list]

Runs one after the other, most worth first, and can be ended and called again at any time: what is
recorded is not run again, and a run that was cut goes on from its last checkpoint. A record is a line
of RECORDS, written when its run has ended. Run directories, and the checkpoints of a run until it is
recorded, are in WORK_DIR (runs/smollm2_study).
"""

# ruff: noqa: E402
from __future__ import annotations

import os
import random
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "common"))
from curves import REWARD, named_curves, read_metrics, read_run_hash, short
from driver import add_record, drive_into, surroundings

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "smollm2" / "prepare.py"))
RECORDS = ROOT / "benchmarks" / "results" / "smollm2_study.json"
WORK = Path(os.environ.get("WORK_DIR", ROOT / "runs" / "smollm2_study"))

SEEDS = range(3)
ESTIMATORS = ("reinforce_plus_plus", "grpo")
TASKS = ("unsolvable", "sums")

STOCK = ("--no-true-on-policy-mode", "--operators", "auto", "--get-mismatch-metrics")
TOKEN_TIS = ("--use-tis", "--tis-level=token", "--tis-mode=truncate", "--tis-upper-bound=2.0")
INT4 = ("--rollout-weight-format", "int4_group128")
ARMS: dict[str, tuple[str, ...]] = {
    "aligned": (),
    "stock": STOCK,
    "stock-tis": (*STOCK, *TOKEN_TIS),
    "int4-aligned": INT4,
    "int4-stock": (*STOCK, *INT4),
    "int4-stock-tis": (*STOCK, *INT4, *TOKEN_TIS),
}
"""Flags of each arm beside the example's. In int4-aligned both sides compute with the rounded weights,
in other int4 arms the engine alone."""

ROLLOUTS, SAVED = 40, 10
SIZE = (
    "--num-rollout", str(ROLLOUTS), "--rollout-batch-size", "8", "--n-samples-per-prompt", "4",
    "--rollout-max-response-len", "24", "--eval-interval", "20", "--no-shuffle",
    "--save-interval", str(SAVED), "--keep-checkpoints", "1",
)  # fmt: skip

PRODUCT = r"What is {} * {}? Give the answer as \boxed{{number}}."
"""The question of an unsolvable prompt: the product of two numbers of four digits."""

CURVES = {
    "reward": REWARD,
    "k3": "train/k3_kl",
    "gradient_norm": "train/grad_norm",
    "entropy": "train/entropy",
    "truncated": "rollout/truncated_ratio",
    "length": "rollout/response_length",
}
"""{name in a record: metric of the run}"""

COMPARED, MISMATCHED = "parity/num_compared_tokens", "parity/num_mismatched_tokens"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the study."""

    task: str
    estimator: str
    arm: str
    seed: int

    @property
    def case(self) -> str:
        """Returns the name that runs with other seeds share. Example: sums-grpo-int4-stock"""
        return f"{self.task}-{self.estimator}-{self.arm}"

    @property
    def name(self) -> str:
        return f"{self.case}-{self.seed}"

    @property
    def flags(self) -> list[str]:
        """Returns the flags beside those of the example, without the paths."""
        given = ["--advantage-estimator", self.estimator, "--seed", str(self.seed)]
        return [*SIZE, *given, *ARMS[self.arm]]

    @property
    def solvable(self) -> float:
        """Returns the share of its prompts that can be solved."""
        return 0.5 if self.task == "unsolvable" else 1.0


def plan() -> Iterator[Run]:
    """Yields every run of the protocol, most worth first."""
    for seed in SEEDS:
        for estimator in ESTIMATORS:
            for task in TASKS:
                for arm in ARMS:
                    yield Run(task=task, estimator=estimator, arm=arm, seed=seed)


def problems(task: str) -> list[dict[str, object]]:
    """Returns the example's sums; with `unsolvable`, every second prompt is a product instead."""
    rng = random.Random(0)
    sums: list[dict[str, object]] = EXAMPLE["rows"](rng)[: EXAMPLE["NUM_TRAIN"]]
    if task == "sums":
        return sums
    pairs = [(rng.randint(1000, 9999), rng.randint(1000, 9999)) for _ in sums[1::2]]
    sums[1::2] = [
        {"prompt": [{"role": "user", "content": PRODUCT.format(a, b)}], "label": str(a * b)}
        for a, b in pairs
    ]
    return sums


def carry_out(run: Run) -> None:
    """Run it, from its last checkpoint if there is one, and record it.

    Raises CalledProcessError if the run fails.
    """
    directory, checkpoints = WORK / run.name, WORK / "checkpoints" / run.name
    prompts, about = WORK / f"{run.task}.jsonl", surroundings(time.time())
    EXAMPLE["write_rows"](prompts, problems(run.task))
    here = ["--prompt-data", prompts, "--run-dir", directory]
    here += ["--save", checkpoints, "--load", checkpoints]
    # On a busy CPU stock operators took more than a minute to prefill 64 chats.
    here += ["--rollout-health-timeout", 600]
    subprocess.run(
        ["examples/smollm2/run.sh", *run.flags, *map(str, here)],
        cwd=ROOT,
        env={**os.environ, "WORK_DIR": str(WORK)},
        check=True,
    )
    add_record(RECORDS, plan(), run, about | record(run, directory))
    shutil.rmtree(checkpoints)


def record(run: Run, directory: Path) -> dict[str, Any]:
    """Returns the record of a run that has ended; its reward is that of the prompts it can solve."""
    records = read_metrics(directory)
    rollouts = [each for each in records if REWARD in each]
    if len(rollouts) != ROLLOUTS:
        raise ValueError(f"{directory}: {len(rollouts)} rollouts, not {ROLLOUTS}.")
    curves = named_curves(rollouts, CURVES)
    return {
        "command": " ".join(["examples/smollm2/run.sh", *run.flags]),
        "run_hash": read_run_hash(directory),
        "seconds": round(sum(each["perf/step_time"] for each in rollouts)),
        "compared_tokens": sum(each.get(COMPARED, 0) for each in rollouts),
        "mismatched_tokens": sum(each.get(MISMATCHED, 0) for each in rollouts),
        "held_out": {each["step"]: each["eval/avg@1"] for each in records if "eval/avg@1" in each},
        "curves": curves | {"reward": [short(x / run.solvable) for x in curves["reward"]]},
    }


if __name__ == "__main__":
    drive_into(RECORDS, str(__doc__).partition("\n")[0], plan(), carry_out)
