"""Writes the table of the study into docs/collapse.md, from the records that there are."""

from __future__ import annotations

import sys
from pathlib import Path

from records import read_curves, summary
from study import RESULTS, Run, plan, record_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from page_tables import between, interval, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collapse.md"

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
            change = f", {run.change}" if run.change else ""
            case = (run.weight_format or "full", f"{run.arm}{estimator}{rollouts}{change}")
            found.setdefault(case, []).append(run)
    return found


def row(engine: str, arm: str, runs: list[Run]) -> list[str]:
    """The cells of a case."""
    summaries = [summary(read_curves(record_of(run))) for run in runs]

    def each(key: str, form: str = ".2f") -> str:
        return ", ".join(format(summary[key], form) for summary in summaries)

    k3 = [" / ".join(f"{s[key]:.0e}" for key in K3 if s[key]) or "0" for s in summaries]
    rewards = [s["reward"] for s in summaries]
    return [
        engine,
        arm,
        ", ".join(str(run.seed) for run in runs),
        "; ".join(filter(None, (each("reward"), interval(rewards)))),
        each("peak"),
        f"{sum(s['collapsed'] for s in summaries)} of {len(runs)}",
        ", ".join(k3),
        each("largest_gradient_norm", ".1f"),
        each("entropy"),
        each("smallest_ess"),
        each("truncated"),
    ]


def with_table(page: str) -> str:
    """The page with the table of the records that there are now."""
    rows = [row(*case, runs) for case, runs in cases().items()]
    return between(page, "records", table(COLUMNS, rows))


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text()))
    print(f"{PAGE}: {len(list(RESULTS.glob('*.json')))} records of {len(list(plan()))} runs")


if __name__ == "__main__":
    main()
