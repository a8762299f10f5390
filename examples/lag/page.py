"""Writes the table of README.md beside it and lag.png, from the records that there are.

python examples/lag/page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from learning import LAGS, RECORDS, Run, plan
from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import REWARD, draw
from driver import read_records
from page_tables import between, interval, table

PAGE = Path(__file__).resolve().parent / "README.md"
PICTURE = Path(__file__).resolve().parent / "lag.png"

END = 5
"""Number of last rollouts that make the reward at the end, and of rollouts in a point of a curve."""

COLUMNS = (
    "lag", "what is done", "reward at the end", "reward over the run", "evaluation",
    "k3", "ESS", "above 2",
)  # fmt: skip

Record = dict[str, Any]


def cases() -> dict[Run, list[Record]]:
    """{the first of its runs: the records of a case}, in the order of lags and arms."""
    records, found = read_records(RECORDS), dict[str, list[Record]]()
    runs = sorted((run for run in plan() if run.name in records), key=lambda r: r.lag)
    firsts = {run.case: run for run in reversed(runs)}
    for run in runs:
        found.setdefault(run.case, []).append(records[run.name])
    return {firsts[case]: each for case, each in found.items()}


def row(run: Run, records: list[Record]) -> list[str]:
    """The cells of a case."""

    def of(name: str) -> list[float]:
        """All values of all its runs."""
        return [v for record in records for v in record["curves"].get(name, []) if v is not None]

    def mean(values: list[float]) -> str:
        return interval(values, ".3f") or f"{values[0]:.3f}"

    def by_lag(name: str, form: str) -> str:
        values = of(f"lag/{run.lag}/{name}") if run.lag else []
        return f"{fmean(values):{form}}" if values else "-"

    rewards = [record["curves"][REWARD] for record in records]
    return [
        str(run.lag),
        run.arm or "-",
        mean([fmean(values[-END:]) for values in rewards]),
        mean([fmean(values) for values in rewards]),
        mean([record["evaluation"] for record in records]),
        by_lag("k3", ".1e"),
        by_lag("ess", ".3f"),
        by_lag("clip_share", ".1%"),
    ]


def with_table(page: str) -> str:
    """The page with the table of the records that there are now."""
    rows = [row(run, records) for run, records in cases().items()]
    return between(page, "lag", table(COLUMNS, rows))


def draw_all() -> None:
    """The reward by lag, a picture for each arm; every seed is a line, thin, and their mean."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), sharey=True)
    found = {(run.lag, run.arm): each for run, each in cases().items()}
    for axis, arm in zip(axes, ("corrected", "uncorrected", "bypass"), strict=True):
        for i, lag in enumerate((0, *LAGS)):
            records = found.get((lag, arm if lag else ""), [])
            if seeds := [record["curves"][REWARD] for record in records]:
                draw(axis, seeds, str(lag), f"C{i}", END)
        axis.set_title(arm)
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"reward, mean of the last {END}")
    axes[0].legend(title="lag", frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    draw_all()
    print(f"{PAGE}, {PICTURE}: {len(read_records(RECORDS))} records of {len(list(plan()))} runs")
