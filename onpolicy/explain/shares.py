"""Contributions of operators as a table: by kind, by layer, by operator, with intervals, and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onpolicy.contract import OUTSIDE
from onpolicy.explain.contributions import Contributions
from onpolicy.explain.taps.experts import EXPERTS, ROUTING
from onpolicy.explain.taps.points import Point
from onpolicy.ops.partial import OPERATORS

Result = dict[str, Any]

COLUMNS = ("kl", "own_kl", "shift", "own_shift")
"""The numbers of a `Contribution`."""

RESAMPLES = 2000

LISTED = 12
"""Operators that are printed."""

BETWEEN = "between operators"
"""What is no operator: residuals, above all, and factors of an embedding."""


def kind_of(point: Point) -> str:
    """A kind of operator, as `onpolicy.ops.partial.OPERATORS` has them, or BETWEEN."""
    (_, operator, _), side = point
    if side == "given" or operator == "embedding":
        return BETWEEN
    if operator in (EXPERTS, ROUTING):
        return "experts"
    return next(kind for kind, names in OPERATORS.items() if operator in names)


def layer_of(point: Point) -> str:
    """A layer, or what is of none."""
    module = point[0][0]
    return f"layer {module.split('.')[1]}" if module.startswith("layers.") else OUTSIDE


def name_of(point: Point) -> str:
    """The operator that made the rows, or before which they were changed."""
    (module, operator, number), side = point
    again = f" ({number + 1})" if number else ""
    return f"{'before ' if side == 'given' else ''}{operator} of {module}{again}"


NAMES: Mapping[str, Callable[[Point], str]] = {
    "kinds": kind_of, "layers": layer_of, "operators": name_of
}  # fmt: skip


def table(found: Sequence[Contributions]) -> Result:
    """Per token of all sequences, in nats: [number, low, high] of everything, low and high of 95 %."""
    points = list(dict.fromkeys(point for one in found for point in one.points))
    columns = {
        column: _float64(
            [getattr(one.points[p], column) if p in one.points else 0.0 for p in points]
            for one in found
        )
        for column in COLUMNS
    }
    tokens = _float64(one.tokens for one in found)
    totals = {name: _float64([getattr(one, name)] for one in found) for name in ("kl", "shift")}
    whole = {name: intervals(values, tokens)[0] for name, values in totals.items()}
    result: Result = {"num_sequences": len(found), "num_tokens": int(tokens.sum()), **whole}
    for name in totals:
        result[f"{name}_remainder"] = whole[name][0] - float(columns[name].sum() / tokens.sum())
    result["own_kl"] = intervals(columns["own_kl"].sum(1, keepdim=True), tokens)[0]
    for by, named in NAMES.items():
        result[by] = _grouped([named(point) for point in points], columns, tokens)
    return result


def _float64(numbers: Iterable[Any]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def _grouped(names: Sequence[str], columns: Mapping[str, Tensor], tokens: Tensor) -> list[Result]:
    own = list(dict.fromkeys(names))
    number = torch.tensor([own.index(name) for name in names])
    rows: list[Result] = [{"name": name} for name in own]
    for column, values in columns.items():
        sums = values.new_zeros(len(values), len(own)).index_add_(1, number, values)
        for row, found in zip(rows, intervals(sums, tokens), strict=True):
            row[column] = found
    return rows


def intervals(values: Tensor, tokens: Tensor) -> list[list[float]]:
    """[number, low, high] per token of each column of float64 [N, C], by a bootstrap over N sequences.

    Tokens of one sequence are not independent, so sequences are drawn anew. float64 [N] counts tokens.
    The seed is fixed. Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), the
    percentile interval.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    weights = torch.zeros(RESAMPLES, len(values), dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    means = (weights @ values) / (weights @ tokens)[:, None]
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return torch.stack([values.sum(0) / tokens.sum(), low, high], dim=1).tolist()


def shares_text(result: Result) -> str:
    """The table for a terminal."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    kl, own = result["kl"][0], result["own_kl"][0]
    left_out = result.get("num_left_out", 0)
    yield (
        f"{result['num_mismatched_tokens']} of {result['num_compared_tokens']} tokens differ, in "
        f"{result['num_sequences'] + left_out} sequences."
    )
    if others := result.get("num_other_choices"):
        yield (
            f"Routers chose other experts for {others} tokens, and what follows is of those before: "
            f"{result['num_tokens']} sampled tokens, in {result['num_sequences']} sequences."
        )
    yield (
        f"KL of the rollout from the trainer, over the whole vocabulary: {_number(result['kl'])} nats "
        "a token"
    )
    yield f"k3 of the sampled tokens: {result['k3_kl_mean']:.2g}"
    if missing := result["only_in_one"]:
        yield f"Not recorded in the rollout, so part of what comes after: {', '.join(missing)}."
    if differ := result.get("ranks_differ"):
        yield (
            "Ranks of the rollout have other numbers in the same rows, and the first one's are taken: "
            f"{', '.join(differ)}."
        )
    if not kl:
        yield "Every operator contributes exactly 0." if _is_zero(result) else "All logits agree."
        return
    yield f"Parts add up to the KL but for {100 * abs(result['kl_remainder']) / kl:.2g} % of it."
    yield (
        f"own: what operators make otherwise of the same rows, {_percent(own, kl)} in all; the rest is "
        "rounding of rows that differed already."
    )
    for by in NAMES:
        yield from _rows_of(result, by, kl)
    first = max(result["kinds"], key=lambda row: row["own_kl"][0])
    if own > 0 and first["name"] != BETWEEN:
        yield (
            f"If one kind alone could be aligned: {first['name']}, which has "
            f"{_percent(first['own_kl'][0], own)} of what operators make otherwise of the same rows."
        )


def _rows_of(result: Result, by: str, kl: float) -> Iterator[str]:
    rows = result[by]
    if by != "layers":
        rows = sorted(rows, key=lambda row: -abs(row["kl"][0]))
    yield f"{by:46}{'KL':>9} {'95 %':>20} {'share':>8} {'own':>8} {'log-prob.':>10}"
    for row in rows[:LISTED] if by == "operators" else rows:
        yield (
            f"{row['name']:46}{row['kl'][0]:9.2g} {_range(row['kl']):>20} "
            f"{_percent(row['kl'][0], kl):>8} {_percent(row['own_kl'][0], kl):>8} "
            f"{row['shift'][0]:10.2g}"
        )


def _is_zero(result: Result) -> bool:
    return all(row[column][0] == 0 for row in result["operators"] for column in COLUMNS)


def _number(found: Sequence[float]) -> str:
    return f"{found[0]:.2g} ({_range(found)})"


def _range(found: Sequence[float]) -> str:
    return f"{found[1]:.2g} to {found[2]:.2g}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
