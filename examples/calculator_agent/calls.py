"""When does the model call? From the samples of a run, a row for every few rollouts.

python examples/calculator_agent/calls.py runs/calculator_agent/run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROLLOUTS = 5


def is_easy(sample: dict[str, Any]) -> bool:
    return len(sample["prompt"]) == len("7*4=")


def calls(samples: list[dict[str, Any]]) -> float:
    """The share of episodes that begin with a call."""
    return fmean(sample["response"].startswith("[") for sample in samples)


def table(run: Path) -> list[dict[str, Any]]:
    """Means over ROLLOUTS rollouts, each; as far as the samples are written."""
    files = sorted((run / "samples").glob("rollout_*.jsonl"))
    rows = []
    for first in range(0, len(files), ROLLOUTS):
        lines = [line for f in files[first : first + ROLLOUTS] for line in f.open()]
        samples = [json.loads(line) for line in lines]
        easy = [sample for sample in samples if is_easy(sample)]
        hard = [sample for sample in samples if not is_easy(sample)]
        rows.append({
            "rollout": first,
            "calls_easy": calls(easy), "reward_easy": fmean(s["reward"] for s in easy),
            "calls_hard": calls(hard), "reward_hard": fmean(s["reward"] for s in hard),
            "reward": fmean(s["reward"] for s in samples),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    rows = table(Path(sys.argv[1]))
    print(*rows[0], sep="  ")
    for row in rows:
        print(*(f"{value:{len(name)}.4g}" for name, value in row.items()), sep="  ")
