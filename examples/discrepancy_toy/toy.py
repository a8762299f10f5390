"""Draws where the three discrepancy penalties put probability, and where they take it away.

One state, 40 actions, a long-tailed rollout policy mu (arXiv 2606.08779, appendix B.2).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from solver import Reading, Vector, penalty, solve_budgeted

MEASURES = ("difference", "log", "ratio")
NUM_ACTIONS = 40
HEAD, TAIL = slice(0, 10), slice(20, NUM_ACTIONS)
LUCKY = 36
"""A tail action with the best advantage of all."""

FLOOR = 0.02
"""The place of a factor of 0 in the picture."""

BUDGETS = {
    "moved": "the same probability moved, ½ Σ|π - μ| = {:g}",
    "own": "the same D = {:g}, in each measure's own unit (eq. 20)",
}


def state() -> tuple[Vector, Vector]:
    """(advantages, mu): a softmax over logits -1.5 log(rank); advantages +1, -1, +1, ... and one 3."""
    logits = -1.5 * np.log(np.arange(1, NUM_ACTIONS + 1))
    mu = np.exp(logits) / np.exp(logits).sum()
    advantages = np.where(np.arange(NUM_ACTIONS) % 2, -1.0, 1.0)
    advantages[LUCKY] = 3.0
    return advantages, mu


def experiment(reading: Reading, budgets: dict[str, float]) -> dict:
    """Optimal policies at each budget, and what they do."""
    advantages, mu = state()

    def moved(policy: Vector) -> float:
        return float(np.abs(policy - mu).sum() / 2)

    result: dict = {"reading": reading, "advantages": advantages.tolist(), "mu": mu.tolist()}
    for name, budget in budgets.items():
        spent = moved if name == "moved" else None
        for measure in MEASURES:
            policy, lam = solve_budgeted(advantages, mu, budget, measure, reading, spent)
            change = policy - mu
            result.setdefault(name, {"budget": budget})[measure] = {
                "lambda": lam,
                "penalty": penalty(policy, mu, measure, reading),
                "moved": moved(policy),
                "expected_advantage": float(policy @ advantages),
                "gained_in_tail": float(np.maximum(change, 0)[TAIL].sum()),
                "lost_in_tail": float(np.maximum(-change, 0)[TAIL].sum()),
                "lucky": float(policy[LUCKY]),
                "at_zero": int((policy == 0).sum()),
                "policy": policy.tolist(),
            }
    return result


def draw(result: dict, image: Path) -> None:
    """One row per budget: pi / mu of every action for each measure, then the change of three groups."""
    figure, axes = plt.subplots(2, 4, figsize=(16, 7.6), width_ratios=[1, 1, 1, 1.15])
    for row, (name, title) in zip(axes, BUDGETS.items(), strict=True):
        for axis, measure in zip(row, MEASURES, strict=False):
            _factors(axis, result, result[name][measure])
            axis.set_title(f"{measure}  (λ = {result[name][measure]['lambda']:.3g})", fontsize=11)
            axis.sharey(row[0])
        row[0].set_ylabel("π / μ")
        _groups(row[3], result, result[name])
        row[0].text(
            0, 1.17, f"At {title.format(result[name]['budget'])}:",
            transform=row[0].transAxes, fontsize=12.5, weight="bold", in_layout=False,
        )  # fmt: skip
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.tight_layout(h_pad=4, rect=(0, 0.05, 1, 0.96))
    figure.savefig(image, dpi=110)
    plt.close(figure)


def _factors(axis: Axes, result: dict, solution: dict) -> None:
    advantages, mu = np.array(result["advantages"]), np.array(result["mu"])
    policy, rank = np.array(solution["policy"]), np.arange(1, NUM_ACTIONS + 1)
    factor = np.maximum(policy / mu, FLOOR)
    for value, label, style in (
        (1, "advantage +1", {"marker": "^", "color": "tab:green"}),
        (-1, "advantage -1", {"marker": "v", "color": "tab:red"}),
        (3, "advantage +3", {"marker": "*", "color": "tab:blue", "s": 130}),
    ):
        chosen = advantages == value
        axis.scatter(rank[chosen], factor[chosen], **{"s": 26, **style}, label=label, zorder=3)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_ylim(FLOOR / 1.5, 600)
    axis.set_yticks([FLOOR, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axis.set_xlim(0, NUM_ACTIONS + 1)
    axis.set_xlabel("action, by its rank under μ")
    axis.grid(alpha=0.3)


def _groups(axis: Axes, result: dict, solutions: dict) -> None:
    mu, width = np.array(result["mu"]), 0.26
    groups = {"ranks 1-10": HEAD, "11-20": slice(10, 20), "21-40 (the tail)": TAIL}
    for offset, measure in zip((-width, 0, width), MEASURES, strict=True):
        change = np.array(solutions[measure]["policy"]) - mu
        places = np.arange(len(groups)) + offset
        gained = [np.maximum(change, 0)[g].sum() for g in groups.values()]
        lost = [np.minimum(change, 0)[g].sum() for g in groups.values()]
        color = {"difference": "tab:purple", "log": "tab:orange", "ratio": "tab:gray"}[measure]
        axis.bar(places, gained, width, color=color, label=measure)
        axis.bar(places, lost, width, color=color)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_title("probability gained (up) and lost (down)", fontsize=11)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=9, loc="lower right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="toy.png and toy.json go there")
    parser.add_argument("--reading", choices=["unweighted", "weighted"], default="unweighted")
    parser.add_argument("--moved", type=float, default=0.15, help="probability moved, 0 to 1")
    parser.add_argument("--budget", type=float, default=0.1, help="D of eq. 20")
    options = parser.parse_args()
    try:
        result = experiment(options.reading, {"moved": options.moved, "own": options.budget})
    except ValueError as error:
        parser.error(str(error))
    options.directory.mkdir(parents=True, exist_ok=True)
    draw(result, options.directory / "toy.png")
    (options.directory / "toy.json").write_text(json.dumps(result, indent=1) + "\n")
    for name in BUDGETS:
        for measure in MEASURES:
            numbers = {k: v for k, v in result[name][measure].items() if k != "policy"}
            print(f"{name:6}{measure:11}", *(f"{k} {v:.3g}" for k, v in numbers.items()), sep="  ")
    print(options.directory / "toy.png")


if __name__ == "__main__":
    main()
