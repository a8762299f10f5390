"""Draws runs over each other: the reward of solvable problems, and how far the engines are apart.

    python examples/collapse/picture.py OUT.png NAME=PATH[,PATH...] ...

NAME: aligned, or like int3-nothing. PATH: a run's directory, or a record of the study; of several each
is a thin line, and their mean a bold one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from records import read_curves

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import draw

SMOOTH = 8
"""Rollouts that a point of a curve is the mean of."""

FORMATS = {"int3": "3-bit", "int4": "4-bit", "fp8_e4m3": "FP8"}
CORRECTIONS = {"nothing": "nothing corrected", "tis_token": "token TIS"}


def title(name: str) -> str:
    """Returns a run's legend: aligned, or an engine's format and an arm, as in int3-nothing."""
    if name == "aligned":
        return "aligned: equal to the last bit (k3 is 0)"
    weight_format, _, arm = name.partition("-")
    weights = FORMATS.get(weight_format, weight_format)
    return f"{weights} rollout weights, {CORRECTIONS.get(arm, arm)}"


def main(image: str, *named: str) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for number, (name, paths) in enumerate(pair.split("=", 1) for pair in named):
        seeds = [read_curves(Path(path)) for path in paths.split(",")]
        draw(left, [curves["reward"] for curves in seeds], title(name), f"C{number}", SMOOTH)
        if any(seeds[0].get("k3", ())):
            draw(right, [curves["k3"] for curves in seeds], title(name), f"C{number}", SMOOTH)
    right.set_yscale("log")
    left.set_title("reward on solvable problems")
    left.set_ylim(0, 1.02)
    right.set_title("how far the engines are apart: k3 per token, in nats")
    for axis in (left, right):
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
    figure.legend(
        handles=left.get_legend_handles_labels()[0],
        loc="lower center",
        ncols=len(named),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(image, dpi=150)
    print(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
