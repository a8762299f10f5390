"""Draws runs over each other: the reward of solvable problems, and how far the engines are apart.

    python examples/collapse/picture.py OUT.png NAME=PATH ...

PATH: a run's directory, or a record of the study. Several of one NAME share a colour.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from records import read_curves

SMOOTH = 8
"""Rollouts that a point of a curve is the mean of."""

TITLES = {
    "aligned": "aligned: equal to the last bit (k3 is 0)",
    "nothing": "3-bit rollout weights, nothing corrected",
    "tis_token": "3-bit rollout weights, token TIS",
}


def smooth(values: list[float]) -> list[float]:
    """Means over the last rollouts, each point's own included."""
    parts = [values[max(0, i + 1 - SMOOTH) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def main(image: str, *named: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    colors: dict[str, str] = {}
    for name, path in (pair.split("=", 1) for pair in named):
        label = None if name in colors else TITLES.get(name, name)
        color = colors.setdefault(name, f"C{len(colors)}")
        curves = read_curves(Path(path))
        left.plot(smooth(curves["reward"]), color=color, label=label)
        if any(curves["k3"]):
            right.semilogy(smooth(curves["k3"]), color=color)
    left.set_title("reward on solvable problems")
    left.set_ylim(0, 1.02)
    right.set_title("how far the engines are apart: k3 per token, in nats")
    for axis in (left, right):
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
    figure.legend(loc="lower center", ncols=len(colors), frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(image, dpi=150)
    print(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
