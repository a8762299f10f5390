"""Draws the runs of run.sh: the reward of solvable problems, and how far the engines are apart.

    python examples/collapse/picture.py OUT.png NAME=RUN_DIR ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW = 8
"""Rollouts that a point of the reward's curve is the mean of."""


def read(run: Path, metric: str) -> list[float]:
    """The metric of every rollout of a run."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record[metric] for record in records if metric in record]


def smooth(values: list[float]) -> list[float]:
    """Means over the last rollouts, each point's own included."""
    parts = [values[max(0, i + 1 - WINDOW) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def main(image: str, *named: str) -> None:
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    for name, run in (pair.split("=", 1) for pair in named):
        # Half of every batch is unsolvable and has the reward 0.
        rewards = [2 * value for value in read(Path(run), "rollout/raw_reward")]
        (line,) = top.plot(smooth(rewards), label=name)
        k3 = read(Path(run), "train/k3_kl")
        if any(k3):
            bottom.semilogy(k3, color=line.get_color(), linewidth=0.8)
        else:
            bottom.plot([], color=line.get_color(), label=f"{name}: 0 on every token")
    top.set_ylabel(f"reward on solvable problems\n(mean of {WINDOW} rollouts)")
    top.set_ylim(0, 1)
    top.legend(loc="upper left", fontsize="small")
    bottom.set_ylabel("engines apart: k3 per token (nats)")
    bottom.set_xlabel("rollout")
    bottom.legend(loc="upper left", fontsize="small")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(image, dpi=150)
    print(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
