"""What the rows of an attribution say: the effect of each part, shares of parts, and their words."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onpolicy.explain.shapley import Order, Share, losses, share

Row = Mapping[str, Any]

STOCK, MODEL, ALIGNED = "stock", "model", "aligned"
"""Rows: nothing is shared; the engine runs the trainer's modelling code, all stock; everything."""


def model_and(*parts: str) -> str:
    """The row in which these kinds of operators, or layers, are aligned."""
    return " + ".join((MODEL, *parts))


def all_but(*parts: str) -> str:
    """The row in which these kinds of operators, or layers, are stock."""
    return " - ".join((ALIGNED, *parts))


def row_with(aligned: Collection[str], parts: Sequence[str]) -> str:
    """The row in which those of the parts are aligned, and `model`."""
    others = [part for part in parts if part not in aligned]
    if len(aligned) > len(others):
        return all_but(*others)
    return model_and(*(part for part in parts if part in aligned))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What aligning one part, a kind of operator or a layer, does to the mean k3."""

    part: str
    before: float
    after: float

    stands_out: bool
    """Whether the change is more than twice the standard error of either number."""

    left: float | None
    """The k3 with every other part aligned, and this one stock; None of `model`, without which nothing
    is aligned."""

    @property
    def percent(self) -> float:
        """Change of the k3; 0 if there was none before."""
        return 100 * (self.after / self.before - 1) if self.before else 0.0


def effects(rows: Sequence[Row]) -> list[Effect]:
    """The effect of `model` on stock engines, then of each part alone on top of it."""
    by_name = {row["name"]: row for row in rows}
    model = by_name[MODEL]
    parts = [name.removeprefix(model_and("")) for name in by_name if name.startswith(model_and(""))]
    of_parts = (_effect(p, model, by_name[model_and(p)], by_name[all_but(p)]) for p in parts)
    return [_effect("model", by_name[STOCK], model, None), *of_parts]


def _effect(part: str, one: Row, other: Row, others: Row | None) -> Effect:
    before, after = one["k3_kl_mean"], other["k3_kl_mean"]
    error = max(one["k3_kl_standard_error"], other["k3_kl_standard_error"])
    left = None if others is None else others["k3_kl_mean"]
    is_clear = abs(before - after) > 2 * error
    return Effect(part=part, before=before, after=after, stands_out=is_clear, left=left)


def shares(rows: Sequence[Row], parts: Sequence[str], orders: Sequence[Order]) -> list[Share]:
    """What `model` and each part have of the k3 of stock engines; shares add up to it.

    `model` comes with every part, so it is first in every order. Source: Faigle and Kern, The Shapley
    Value for Cooperative Games under Precedence Constraints (1992).
    """
    own = {row["name"]: row["sequence_k3_kl_sums"] for row in rows}
    sums = {name: torch.tensor(of_row, dtype=torch.float64) for name, of_row in own.items()}
    tokens = torch.tensor(rows[0]["sequence_lengths"], dtype=torch.float64)
    lost = losses(lambda aligned: sums[row_with(aligned, parts)], orders)
    model = (sums[STOCK] - sums[MODEL]).expand(len(orders), -1)
    return [share(MODEL, model, tokens), *(share(part, lost[part], tokens) for part in parts)]


def attribution_text(result: Mapping[str, Any]) -> str:
    """The table and what it says, for a terminal."""
    return "\n".join(_lines(result))


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    rows, by = result["rows"], result["by"]
    yield f"{rows[0]['num_compared_tokens']} tokens, the same in every row"
    yield f"{'':22}{'k3':>9} {'+-':>8} {'mean |d|':>9} {'max |d|':>9} {'mismatched':>11}"
    for row in rows:
        yield (
            f"{row['name']:22}{row['k3_kl_mean']:9.2g} {row['k3_kl_standard_error']:8.1g} "
            f"{row['mean_abs_diff']:9.2g} {row['max_abs_diff']:9.2g} {row['num_mismatched_tokens']:11}"
        )
    model, *parts = effects(rows)
    yield f"Running the trainer's modelling code in the engine {_change(model)}."
    yield f"There, of one of the {by} alone:"
    for effect in parts:
        yield (
            f"  {effect.part}: aligned, it {_change(effect)}; stock, with all else aligned, it makes "
            f"{effect.left:.2g}"
        )
    if orders := result.get("orders"):
        yield from _shared_out(orders, by)
    else:
        yield "These do not add up to the k3 of stock engines; --orders shares that out."


def _shared_out(orders: Mapping[str, Any], by: str) -> Iterator[str]:
    found = [Share(**one) for one in orders["shares"]]
    whole = sum(one.value for one in found)
    yield (
        f"The k3 of stock engines, {whole:.2g}, by what it loses when {MODEL} and then the {by} are "
        f"aligned one after another, in {len(orders['drawn'])} random orders and their reverses:"
    )
    yield f"{'':22}{'k3':>9} {'share':>8} {'+- orders':>10} {'+- prompts':>11}"
    for one in found:
        part = f"{100 * one.value / whole:.0f} %" if whole else ""
        chance = "" if one.stands_out or not one.value else "  no more than chance"
        yield (
            f"{one.part:22}{one.value:9.2g} {part:>8} {one.error_of_orders:10.1g} "
            f"{one.error_of_prompts:11.1g}{chance}"
        )


def _change(effect: Effect) -> str:
    if effect.after == effect.before:
        return "changes nothing"
    told = f"takes k3 from {effect.before:.2g} to {effect.after:.2g} ({effect.percent:+.0f} %)"
    return told if effect.stands_out else f"{told}, no more than chance"
