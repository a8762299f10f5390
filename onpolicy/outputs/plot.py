"""Draws a run: reward, response length, and the mismatch between the engines."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from onpolicy import files
from onpolicy.outputs.metrics import read_jsonl

_PANELS = (
    ("rollout/raw_reward", "mean reward"),
    ("rollout/response_length", "mean response length (tokens)"),
    ("parity/num_mismatched_tokens", "mismatched tokens"),
)


def plot_run(metrics_file: Path, image: Path) -> None:
    """Write a PNG with one panel per quantity over rollouts."""
    records = [r for r in read_jsonl(metrics_file) if "rollout/raw_reward" in r]
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(4.5 * len(_PANELS), 3.2))
    for axis, (name, title) in zip(axes, _PANELS, strict=True):
        axis.plot([r["step"] for r in records], [r.get(name) for r in records], marker=".")
        axis.set_xlabel("rollout")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    compared = sum(r.get("parity/num_compared_tokens", 0) for r in records)
    axes[-1].set_ylim(top=max(1, *axes[-1].get_ylim()))
    axes[-1].set_title(f"mismatched of {compared:,.0f} tokens")
    figure.tight_layout()
    with files.replacing(image) as partial:
        figure.savefig(partial, dpi=120)
    plt.close(figure)
