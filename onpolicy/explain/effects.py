"""The table of `onpolicy explain --attribution`: what a row measures, and how far effects add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onpolicy.parity import compare_log_probs, k3

Row = Mapping[str, Any]

STOCK, MODEL, ALIGNED = "stock", "model", "aligned"
"""Rows: nothing is shared; the engine runs the trainer's modelling code, all stock; everything."""


def model_and(part: str) -> str:
    """The row in which one kind of operator, or one layer, is aligned."""
    return f"{MODEL} + {part}"


def all_but(part: str) -> str:
    """The row in which one kind of operator, or one layer, is stock."""
    return f"{ALIGNED} - {part}"


def difference(train: Sequence[Tensor], rollout: Sequence[Tensor]) -> dict[str, Any]:
    """How two engines' log-probabilities of the same tokens differ: float32 [R] of each response."""
    ours, theirs = torch.cat(list(train)), torch.cat(list(rollout))
    counts, _ = compare_log_probs(ours, theirs)
    return {
        "num_compared_tokens": counts.num_compared,
        "num_mismatched_tokens": counts.num_mismatched,
        "k3_kl_mean": counts.mean_k3,
        "k3_kl_standard_error": float(k3(ours, theirs).std()) / max(len(ours), 1) ** 0.5,
        "mean_abs_diff": counts.mean_abs_diff,
        "max_abs_diff": counts.max_abs_diff,
    }


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


def sums(rows: Sequence[Row]) -> tuple[float, float] | None:
    """How far effects add up: (what parts take away one by one, what they leave when one by one they
    are stock), each added up and as a share of the k3 that all of them together take away.

    None if there is nothing to take away. `model` is no part of it: it comes with each of them.
    """
    whole = {row["name"]: row["k3_kl_mean"] for row in rows}[MODEL]
    parts = [effect for effect in effects(rows) if effect.left is not None]
    if not whole:
        return None
    taken = sum(effect.before - effect.after for effect in parts)
    return taken / whole, sum(effect.left or 0.0 for effect in parts) / whole


def attribution_text(rows: Sequence[Row], by: str) -> str:
    """The table and what it says, for a terminal; `by`: kinds or layers."""
    return "\n".join(_lines(rows, by))


def _lines(rows: Sequence[Row], by: str) -> Iterator[str]:
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
    if (shares := sums(rows)) is not None:
        taken, left = (f"{100 * share:.0f} %" for share in shares)
        yield (
            f"Added up, the {by} take away {taken} of that k3 one by one, and leave {left} of it; what "
            "is missing to 100 % is what they do to each other."
        )


def _change(effect: Effect) -> str:
    if effect.after == effect.before:
        return "changes nothing"
    told = f"takes k3 from {effect.before:.2g} to {effect.after:.2g} ({effect.percent:+.0f} %)"
    return told if effect.stands_out else f"{told}, no more than chance"
