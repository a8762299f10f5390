"""Writes the table of the study into docs/collapse.md, from the records that there are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

from records import read_curves, summary
from study import RESULTS, Run, plan, record_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collapse.md"
BEGIN, END = "<!-- records: begin -->\n", "<!-- records: end -->\n"

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided 95 % quantile of Student's t for the mean of so many runs."""

COLUMNS = (
    "engine", "arm", "seeds", "reward at the end: each; mean +- 95 %", "peak", "collapsed",
    "k3: first rollout / first 20 / last 20", "largest gradient norm",
    "entropy", "smallest ESS", "truncated",
)  # fmt: skip

K3 = ("k3_start", "k3_first", "k3_last")


def cases() -> dict[tuple[str, str], list[Run]]:
    """{(engine, arm): its recorded runs}, in the order of the protocol."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in plan():
        if record_of(run).exists():
            estimator = "" if run.estimator == "reinforce_plus_plus" else f", {run.estimator}"
            rollouts = "" if run.rollouts == 160 else f", {run.rollouts} rollouts"
            case = (run.weight_format or "full", f"{run.arm}{estimator}{rollouts}")
            found.setdefault(case, []).append(run)
    return found


def row(engine: str, arm: str, runs: list[Run]) -> str:
    summaries = [summary(read_curves(record_of(run))) for run in runs]

    def each(key: str, form: str = ".2f") -> str:
        return ", ".join(format(summary[key], form) for summary in summaries)

    k3 = [" / ".join(f"{s[key]:.0e}" for key in K3 if s[key]) or "0" for s in summaries]
    cells = [
        engine,
        arm,
        ", ".join(str(run.seed) for run in runs),
        each("reward") + interval([s["reward"] for s in summaries]),
        each("peak"),
        f"{sum(s['collapsed'] for s in summaries)} of {len(runs)}",
        ", ".join(k3),
        each("largest_gradient_norm", ".1f"),
        each("entropy"),
        each("smallest_ess"),
        each("truncated"),
    ]
    return line(cells)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return ""
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5
    return f"; {fmean(values):.2f} +- {half:.2f}"


def table() -> str:
    head = line(COLUMNS) + "|---" * len(COLUMNS) + "|\n"
    return head + "".join(row(*case, runs) for case, runs in cases().items())


def with_table(page: str) -> str:
    """The page with the table of the records that there are now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text()))
    print(f"{PAGE}: {len(list(RESULTS.glob('*.json')))} records of {len(list(plan()))} runs")


if __name__ == "__main__":
    main()
