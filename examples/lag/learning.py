"""The quickstart's run with samples of earlier weights and each correction; one record a run.

    python examples/lag/learning.py [--only 'lag-4-*' ...] [--list]

Runs one after the other, in the order of the patterns, and can be ended and called again at any time.
What is recorded is not run again. A record is a line of benchmarks/results/lag_learning.json: the
command, how it ended, and the curves. Run directories are in WORK_DIR (runs/lag).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import read_metrics, read_rollouts, read_run_hash, short
from driver import add_record, drive_into

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
"""Corrections of samples of earlier weights, and their flags. When the runs were made the first was
the default, and its flags were none; `bypass` is by now."""

CURVES = (
    "rollout/raw_reward", "rollout/response_length", "train/grad_norm", "train/entropy",
    "train/pg_clipfrac", "lag/*",
)  # fmt: skip
"""Metrics of the run; a lag's metrics are null where no token has that lag."""

MISMATCHED = ("parity/num_mismatched_tokens", "probe/num_mismatched_tokens")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; without an arm there is no lag."""

    seed: int
    lag: int = 0
    arm: str = ""

    @property
    def case(self) -> str:
        """Returns the name that runs with other seeds share. Example: lag-2-bypass"""
        return f"lag-{self.lag}-{self.arm}" if self.arm else f"lag-{self.lag}"

    @property
    def name(self) -> str:
        return f"{self.case}-{self.seed}"

    @property
    def flags(self) -> list[str]:
        """Returns the flags beside the quickstart's."""
        lag = ["--rollout-lag", str(self.lag), *ARMS[self.arm]] if self.lag else []
        return ["--seed", str(self.seed), *lag]

    @property
    def command(self) -> list[str]:
        """Returns the command, to be called from the repository."""
        return ["examples/quickstart/run.sh", *self.flags]


def plan() -> Iterator[Run]:
    """Yields every run of the protocol, in its order."""
    for arms in (("corrected", "uncorrected"), ("bypass",)):
        for seed in SEEDS:
            if "bypass" not in arms:
                yield Run(seed=seed)
            for arm in arms:
                for lag in LAGS:
                    yield Run(seed=seed, lag=lag, arm=arm)


def carry_out(run: Run) -> None:
    """Run it, and record it. Raises CalledProcessError if the run fails."""
    directory = WORK / run.name
    subprocess.run(
        [*run.command, "--run-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "WORK_DIR": str(WORK)},
        check=True,
    )
    add_record(RECORDS, plan(), run, record(run, directory))


def record(run: Run, directory: Path) -> dict[str, Any]:
    """Returns the record of a run that has ended."""
    records = read_metrics(directory)
    return {
        "command": " ".join(run.command),
        "run_hash": read_run_hash(directory),
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
    drive_into(RECORDS, str(__doc__).partition("\n")[0], plan(), carry_out)
