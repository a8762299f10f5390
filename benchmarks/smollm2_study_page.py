"""Writes the tables of smollm2_study.md and its picture, from the records that there are.

python -m benchmarks.smollm2_study_page
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.smollm2_study import ARMS, ESTIMATORS, RECORDS, ROOT, TASKS, plan

sys.path.insert(0, str(ROOT / "examples" / "common"))
from chance import flip_p, holm
from curves import draw, summarise
from driver import read_records
from page_tables import between, interval, table

PAGE = Path(__file__).with_name("smollm2_study.md")
PICTURE = RECORDS.with_suffix(".png")

END = 10
"""Last rollouts that make the reward at the end, and rollouts in a point of a curve."""

COLUMNS = (
    "task", "estimator", "arm", "reward at the end", "held out: before, end", "collapsed", "k3",
    "gradient norm", "entropy", "cut off", "mismatched",
)  # fmt: skip

PAIRS = (
    ("aligned", "stock"), ("stock-tis", "stock"), ("aligned", "stock-tis"),
    ("int4-aligned", "int4-stock"), ("int4-stock-tis", "int4-stock"),
    ("int4-aligned", "int4-stock-tis"),
)  # fmt: skip

Record = dict[str, Any]


def cases(records: dict[str, Record]) -> dict[tuple[str, str, str], list[Record]]:
    """{(task, estimator, arm): the records of its seeds}, in the order of the table."""
    found = dict[tuple[str, str, str], list[Record]]()
    for case in product(TASKS, ESTIMATORS, ARMS):
        names = [run.name for run in plan() if (run.task, run.estimator, run.arm) == case]
        if seeds := [records[name] for name in names if name in records]:
            found[case] = seeds
    return found


def held_out(record: Record) -> list[float]:
    return list(record["held_out"].values())


def row(case: tuple[str, str, str], records: list[Record]) -> list[str]:
    """The cells of a case."""
    summaries = [summarise(record["curves"], END) for record in records]
    before, after = (fmean(held_out(record)[i] for record in records) for i in (0, -1))

    def last(name: str) -> float:
        return fmean(fmean(record["curves"][name][-END:]) for record in records)

    counts = [sum(r[f"{kind}_tokens"] for r in records) for kind in ("mismatched", "compared")]
    rewards = [summary["reward"] for summary in summaries]
    return [
        *case,
        interval(rewards) or f"{rewards[0]:.2f}",
        f"{before:.2f}, {after:.2f}",
        f"{sum(summary['collapsed'] for summary in summaries)} of {len(records)}",
        f"{median(summary['k3_last'] for summary in summaries):.0e}",
        f"{max(summary['largest_gradient_norm'] for summary in summaries):.1f}",
        f"{last('entropy'):.2f}",
        f"{last('truncated'):.0%}",
        "{:,} of {:,}".format(*counts),
    ]


def differences(records: dict[str, Record]) -> list[list[str]]:
    """A row for each pair of arms, over the tasks, estimators and seeds that both have."""
    rows, ps = [], []
    for a, b in PAIRS:
        others = {run.name: replace(run, arm=b).name for run in plan() if run.arm == a}
        pairs = [(records[n], records[m]) for n, m in others.items() if {n, m} <= records.keys()]
        if pairs:
            ends = [[summarise(r["curves"], END)["reward"] for r in pair] for pair in pairs]
            ps.append(flip_p([x - y for x, y in ends]))
            means = (
                fmean(x - y for x, y in ends),
                fmean(held_out(x)[-1] - held_out(y)[-1] for x, y in pairs),
            )
            cells = [f"{mean:+.3f}" for mean in means]
            rows.append([f"{a} less {b}", str(len(pairs)), *cells, f"{ps[-1]:.4f}"])
    return [[*cells, f"{p:.4f}"] for cells, p in zip(rows, holm(ps), strict=True)]


def with_tables(page: str, records: dict[str, Record]) -> str:
    """The page with the tables of these records."""
    rows = [row(case, each) for case, each in cases(records).items()]
    columns = ("difference", "pairs", "reward at the end", "held out", "p of the reward", "Holm")
    page = between(page, "runs", table(COLUMNS, rows))
    return between(page, "differences", table(columns, differences(records)))


def draw_all(records: dict[str, Record], image: Path) -> None:
    """Draws the reward by rollout of each task and estimator, an arm in a colour."""
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), sharex=True, sharey=True)
    for axis, place in zip(axes.flat, product(TASKS, ESTIMATORS), strict=True):
        for (task, estimator, arm), each in cases(records).items():
            if (task, estimator) == place:
                seeds = [record["curves"]["reward"] for record in each]
                draw(axis, seeds, arm, f"C{list(ARMS).index(arm)}", END)
        axis.set_title(", ".join(place))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"reward, mean of the last {END}")
    axes[1, 0].set_xlabel("rollout")
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    found = read_records(RECORDS)
    PAGE.write_text(with_tables(PAGE.read_text(), found))
    draw_all(found, PICTURE)
    print(f"{PAGE}, {PICTURE}: {len(found)} records of {len(list(plan()))} runs")
