"""Writes the tables of the study into its results and docs/collapse.md, from the records."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, median

import alarms
import significance
from records import read_curves, summary
from study import RESULTS, Run, plan, record_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from curves import Curves
from page_tables import between, interval, table

PAGES = (RESULTS / "README.md", Path(__file__).resolve().parents[2] / "docs" / "collapse.md")

COLUMNS = (
    "engine", "arm", "reward at the end: each; mean +- 95 %", "peak", "collapsed",
    "k3: first 20 / last 20", "gradient norm",
)  # fmt: skip

SUMMARY = ("engine", "arm", "drift that is left", "cost", "reward at the end", "collapsed")
"""Columns of the table of docs/collapse.md, which has the arms of five seeds."""

WHOLE, BOUND, MASKED, OWN = "all", "of what is bounded", "of what is masked", "its own"
PASS = "a forward pass before the loss"
CHOICES = {
    "aligned": ("none", "aligned operators"),
    "aligned_rounded": ("none", "aligned operators"),
    "nothing": (WHOLE, ""),
    "stale": (WHOLE, ""),
    "nothing, grpo": ("none of unsolved prompts", ""),
    "stale, grpo": ("none of unsolved prompts", ""),
    "tis_token, grpo": ("none of unsolved prompts", ""),
    "half_at_random, grpo": ("none of unsolved prompts", "samples"),
    "geo_rs, grpo": (MASKED, "samples"),
    "geo_rs_0.01, grpo": (MASKED, "samples"),
    "nothing, otb": ("none of unsolved prompts", "the trainer's probabilities, squared"),
    "tis_token, otb": (BOUND, "the trainer's probabilities, squared"),
    "centered": ("none", "top-k from the engine, an output projection"),
    "centered_top8": ("of the tokens left out", "top-k from the engine, an output projection"),
    "centered_tis": ("none", "top-k from the engine, an output projection"),
    "tis_token": (BOUND, ""),
    "vcpo": (BOUND, "slower where ESS is low"),
    "topr": ("of good answers, and of what is bounded", ""),
    "mis_token": (MASKED, ""),
    "kpop": (WHOLE + ", and of what is masked", ""),
    "tis_sequence": (BOUND, "variance"),
    "mis_sequence": (MASKED, "variance"),
    "geometric": (OWN, ""),
    "geometric_normalized": (OWN, PASS),
    "geo_rs": (WHOLE + ", and of what is masked", "samples"),
    "geo_rs_0.01": (WHOLE + ", and of what is masked", "samples"),
    "dc_0.0037": (WHOLE + ", and its own", PASS),
    "dc_0.03": (WHOLE + ", and its own", PASS),
    "dc_0.1": (WHOLE + ", and its own", PASS),
    "length_decay": (WHOLE + ", in smaller steps", "slower"),
    "bypass": ("towards the engine", ""),
    "governor": ("as on its step", ""),
}
"""{arm: (what of the drift b (mu - pi) it leaves, what it costs)}; as test_drift.py says exactly."""


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

    def of(key: str) -> list[float]:
        return [summary[key] for summary in summaries]

    each = ", ".join(f"{reward:.2f}" for reward in of("reward"))
    return [
        engine,
        arm,
        "; ".join(filter(None, (each, interval(of("reward"))))),
        f"{fmean(of('peak')):.2f}",
        f"{sum(of('collapsed'))} of {len(runs)}",
        k3_cell(of("k3_first"), of("k3_last")),
        f"{max(of('largest_gradient_norm')):.1f}",
    ]


def k3_cell(first: list[float | None], last: list[float | None]) -> str:
    """The medians over seeds; "-" where samples lag, since no token is compared."""
    if None in last:
        return "-"
    return " / ".join(f"{median(each):.0e}" for each in (first, last)) if any(last) else "0"


def short_row(engine: str, arm: str, runs: list[Run]) -> list[str]:
    """Returns the cells of a case for the table of docs/collapse.md."""
    _, _, reward, _, collapsed, *_ = row(engine, arm, runs)
    choice = CHOICES[arm.partition(", lag_")[0]]
    return [engine, arm, *choice, reward.partition("; ")[2], collapsed]


def measured(curves: dict[tuple[str, str], list[Curves]]) -> dict[str, list[Curves]]:
    """{engine: the curves of its runs}, of runs that recorded all that alarms read."""
    found: dict[str, list[Curves]] = {"int3": [], "others": []}
    for (engine, _), runs in curves.items():
        kind = engine if engine in found else "others"
        found[kind].extend(run for run in runs if "ess" in run)
    return found


def with_tables(page: str) -> str:
    """The page with the tables of the records that there are now."""
    rows = [row(*case, runs) for case, runs in cases().items()]
    curves = {case: [read_curves(record_of(run)) for run in runs] for case, runs in cases().items()}
    ends = {case: [summary(each)["reward"] for each in seeds] for case, seeds in curves.items()}
    tables = {
        "records": table(COLUMNS, rows),
        "alarms": table(alarms.COLUMNS, alarms.rows(measured(curves))),
        "differences": table(significance.COLUMNS, significance.differences(ends)),
        "collapses": table(
            ("engine", "arm", *significance.DEFINITIONS), significance.collapses(curves)
        ),
    }
    seeds = [(case, runs) for case, runs in cases().items() if len(runs) == 5]
    tables["summary"] = table(SUMMARY, [short_row(*case, runs) for case, runs in seeds])
    for mark, text in tables.items():
        if f"<!-- {mark}: begin -->" in page:
            page = between(page, mark, text)
    return page


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
    print(f"{RESULTS}: {len(list(RESULTS.glob('*.json')))} records of {len(list(plan()))} runs")


if __name__ == "__main__":
    main()
