"""Quickstart's run with samples of earlier weights, and what is done about them; one record a run.

    python examples/lag/learning.py [--only 'lag-4-*' ...] [--list]

Runs one after the other, in the order of the patterns, and can be ended and called again at any time.
What is recorded is not run again. A record is a line of benchmarks/results/lag_learning.json: the
command, how it ended, and the curves. Run directories are in WORK_DIR (runs/lag).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import read_rollouts, short
from driver import drive, write_whole

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "lag_learning.json"
WORK = Path(os.environ.get("WORK_DIR", ROOT / "runs" / "lag"))

SEEDS = range(3)
LAGS = (1, 2, 4)
ARMS = {
    "corrected": ["--use-tis"],
    "uncorrected": ["--no-correct-lag"],
    "bypass": ["--use-rollout-logprobs"],
}
"""What is done about samples of earlier weights, and its flags. When the runs were made the first was
the default, and its flags were none; `bypass` is by now."""

CURVES = (
    "rollout/raw_reward", "rollout/response_length", "train/grad_norm", "train/entropy",
    "train/pg_clipfrac", "lag/*",
)  # fmt: skip
"""Metrics of the run; those of a lag are absent (null) where no token has it."""

MISMATCHED = ("parity/num_mismatched_tokens", "probe/num_mismatched_tokens")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; without an arm there is no lag."""

    seed: int
    lag: int = 0
    arm: str = ""

    @property
    def case(self) -> str:
        """What runs with other seeds share. Example: lag-2-bypass"""
        return f"lag-{self.lag}-{self.arm}" if self.arm else f"lag-{self.lag}"

    @property
    def name(self) -> str:
        return f"{self.case}-{self.seed}"

    @property
    def flags(self) -> list[str]:
        """In addition to those of the quickstart."""
        lag = ["--rollout-lag", str(self.lag), *ARMS[self.arm]] if self.lag else []
        return ["--seed", str(self.seed), *lag]

    @property
    def command(self) -> list[str]:
        """From the repository."""
        return ["examples/quickstart/run.sh", *self.flags]


def plan() -> Iterator[Run]:
    """Every run of the protocol, in the order in which they are to be made."""
    for arms in (("corrected", "uncorrected"), ("bypass",)):
        for seed in SEEDS:
            if "bypass" not in arms:
                yield Run(seed=seed)
            for arm in arms:
                for lag in LAGS:
                    yield Run(seed=seed, lag=lag, arm=arm)


def read_records() -> dict[str, dict[str, Any]]:
    """{name of a run: its record}, in the order of the plan."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def carry_out(run: Run) -> None:
    """Run it, and record it. Raises CalledProcessError if the run fails."""
    directory = WORK / run.name
    subprocess.run(
        [*run.command, "--run-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "WORK_DIR": str(WORK)},
        check=True,
    )
    records = read_records() | {run.name: record(run, directory)}
    ordered = [name for name in (run.name for run in plan()) if name in records]
    lines = [f"  {json.dumps(name)}: {json.dumps(records[name])}" for name in ordered]
    write_whole(RECORDS, "{\n" + ",\n".join(lines) + "\n}\n")


def record(run: Run, directory: Path) -> dict[str, Any]:
    """What is kept of a run that has ended."""
    records = [*map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]
    (run_hash,) = re.findall(r"run hash (\w+)", (directory / "logs" / "train.log").read_text())
    return {
        "command": " ".join(run.command),
        "run_hash": run_hash,
        "mismatched_tokens": sum(r.get(name, 0) for r in records for name in MISMATCHED),
        "evaluation": records[-1]["eval/avg@1"],
        "curves": read_curves(directory),
    }


def read_curves(directory: Path) -> dict[str, list[float | None]]:
    """The curves of CURVES, by the names of their metrics."""
    rollouts = read_rollouts(directory)
    names = dict.fromkeys(name for rollout in rollouts for name in rollout)
    kept = [name for name in names if any(fnmatch(name, pattern) for pattern in CURVES)]
    return {
        name: [short(rollout[name]) if name in rollout else None for rollout in rollouts]
        for name in kept
    }


if __name__ == "__main__":
    drive(
        str(__doc__).partition("\n")[0], plan(), lambda run: run.name in read_records(), carry_out
    )
