"""Evaluation of measured cases: rates, fractions of the ceilings, goals; and a table of all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.gpu_ops.cases import Case

Record = dict[str, Any]


def describe(
    case: Case,
    seconds: Mapping[str, float],
    aligned: Collection[str],
    ceilings: Mapping[str, float],
) -> Record:
    """Return one case as JSON: `seconds` per call by variant; ceilings in FLOP/s and bytes/s.

    The fraction of the ceiling is the time that arithmetic or memory alone would take, whichever is
    longer, over the measured time.
    """
    least = max(case.flops / ceilings["flops"], case.bytes / ceilings["bandwidth"])
    variants: dict[str, Record] = {
        name: {
            "microseconds": 1e6 * s,
            "tflops": 1e-12 * case.flops / s,
            "gb_per_s": 1e-9 * case.bytes / s,
            "fraction_of_ceiling": least / s,
        }
        for name, s in seconds.items()
    }
    for name in aligned:
        variants[name]["speed_over"] = {
            other: s / seconds[name] for other, s in seconds.items() if other not in aligned
        }
        variants[name]["goal_met"] = _goal_met(case, variants[name], ceilings)
    return {
        "operator": case.operator,
        "where": case.where,
        "rows": case.rows,
        "goal": None if case.goal is None else str(case.goal),
        "variants": variants,
    }


def _goal_met(case: Case, variant: Record, ceilings: Mapping[str, float]) -> bool | None:
    """Return whether a goal is met; None: there is no goal, or its reference is not installed."""
    if case.goal is None:
        return None
    if case.goal.of == "bandwidth":
        return variant["gb_per_s"] * 1e9 >= case.goal.fraction * ceilings["bandwidth"]
    speed = variant["speed_over"].get(case.goal.of)
    return None if speed is None else speed >= case.goal.fraction


def verdict(record: Record, name: str) -> str:
    """Return the goal, and its outcome: `0.95 of torch.mm: met`, `missed`, `not judged`; or `-`."""
    if record["goal"] is None:
        return "-"
    met = record["variants"][name]["goal_met"]
    return f"{record['goal']}: {'not judged' if met is None else 'met' if met else 'missed'}"


def line(record: Record) -> str:
    """Return one case on one line, to watch while it runs."""
    times = ", ".join(
        f"{name} {v['microseconds']:.1f} us" for name, v in record["variants"].items()
    )
    goals = [
        f"{name} {verdict(record, name)}"
        for name, v in record["variants"].items()
        if "goal_met" in v and record["goal"]
    ]
    where = f"{record['operator']} M={record['rows']} {record['where']}"
    return "; ".join([f"{where}: {times}", *goals])


def markdown(result: Record) -> str:
    """Return the whole result as a page."""
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    return f"# Aligned operators against what they replace\n\n{machine}\n\n{summary(result)}\n"


def summary(result: Record) -> str:
    """Return the ceilings, the table, and the failed and omitted cases."""
    ceilings = result["ceilings"]
    counts = result["goals"]
    parts = [
        f"Ceilings measured in the same run: cuBLAS {ceilings['flops'] / 1e12:.0f} TFLOP/s, copies "
        f"{ceilings['bandwidth'] / 1e9:.0f} GB/s. Goals met: {counts['met']}, missed: "
        f"{counts['missed']}, not judged: {counts['not judged']}.",
        table(HEAD, [_row(case, name) for case in result["cases"] for name in _aligned(case)]),
    ]
    if result["failed"]:
        parts += ["Failed:", "\n".join(f"- {f['case']}: {f['error']}" for f in result["failed"])]
    if result["not_measured"]:
        parts += [
            "Not measured, for lack of time:",
            "\n".join(f"- {c}" for c in result["not_measured"]),
        ]
    return "\n\n".join(parts)


HEAD = (
    "operator",
    "sizes",
    "M",
    "variant",
    "us",
    "TFLOP/s",
    "GB/s",
    "of ceiling",
    "speed over",
    "goal",
)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _aligned(record: Record) -> list[str]:
    return [name for name, variant in record["variants"].items() if "speed_over" in variant]


def _row(record: Record, name: str) -> list[str]:
    """Return the row of an aligned variant of a case."""
    v = record["variants"][name]
    over = ", ".join(f"{other} {ratio:.2f}" for other, ratio in v["speed_over"].items())
    return [
        record["operator"], record["where"], str(record["rows"]), name,
        f"{v['microseconds']:.1f}", f"{v['tflops']:.1f}", f"{v['gb_per_s']:.0f}",
        f"{v['fraction_of_ceiling']:.2f}", over, verdict(record, name),
    ]  # fmt: skip


def count_goals(records: list[Record]) -> dict[str, int]:
    """Count the outcomes over all aligned variants that have a goal."""
    judged = [
        record["variants"][name]["goal_met"]
        for record in records
        if record["goal"]
        for name in _aligned(record)
    ]
    return {
        "met": judged.count(True),
        "missed": judged.count(False),
        "not judged": judged.count(None),
    }
