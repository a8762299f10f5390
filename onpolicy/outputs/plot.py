"""Plot of a run: reward with its evaluations, response length, and mismatched tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onpolicy.outputs.metrics import read_jsonl
from onpolicy.system import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Panel:
    """A panel of metrics that share an axis, by name or pattern."""

    title: str
    metrics: tuple[str, ...]

    include: tuple[float, ...] = ()
    """Values that the axis always includes; without any it fits the data."""


PANELS = (
    Panel("mean reward", ("rollout/raw_reward", "eval/avg@*", "eval/*/avg@*")),
    Panel("mean response length (tokens)", ("rollout/response_length",), include=(0,)),
    Panel("mismatched of {compared:,.0f} tokens", ("parity/num_mismatched_tokens",), (0, 1)),
)


def plot_run(metrics_file: Path, image: Path) -> None:
    """Write a PNG with one panel per quantity over rollouts; all finite values are visible."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_jsonl(metrics_file)
    compared = sum(record.get("parity/num_compared_tokens", 0) for record in records)
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.5 * len(PANELS), 3.2))
    for axis, panel in zip(axes, PANELS, strict=True):
        _draw(axis, panel, records)
        axis.set_title(panel.title.format(compared=compared))
    figure.tight_layout()
    with files.replacing(image) as partial:
        figure.savefig(partial, dpi=120, format="png")
    pyplot.close(figure)


def _draw(axis: Axes, panel: Panel, records: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    logged = dict.fromkeys(name for record in records for name in record)
    names = [name for pattern in panel.metrics for name in logged if fnmatchcase(name, pattern)]
    curves = {name: _curve(name, records) for name in names}
    for name, (steps, values) in curves.items():
        style = "o--" if name.startswith("eval/") else ".-"
        axis.plot(steps, values, style, markersize=5, label=name)
        axis.update_datalim([(step, value) for step in steps[:1] for value in panel.include])
    axis.autoscale_view()
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if steps := [record["step"] for record in records]:
        axis.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    if all(math.isnan(value) for _, values in curves.values() for value in values):
        axis.text(0.5, 0.5, "no values", transform=axis.transAxes, ha="center", va="center")
    if len(curves) > 1:
        axis.legend(fontsize="small")
    axis.set_xlabel("rollout")
    axis.grid(alpha=0.3)


def _curve(name: str, records: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric; a value that is not finite becomes NaN, which breaks the
    line."""
    logged = [(record["step"], record[name]) for record in records if name in record]
    values = [value if math.isfinite(value) else math.nan for _, value in logged]
    return [step for step, _ in logged], values
