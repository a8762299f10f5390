"""Shapley values: a total, shared out among parts of which each takes some away when it is aligned.

A part's value is what the total loses when that part is aligned after others, on average over orders.
In any order what is lost adds up to the whole, and so do averages. An order and its reverse are exact
where parts act alone or by twos. Sources: Shapley, A Value for n-Person Games (1953); orders drawn at
random, Castro, Gómez and Tejada (2009); each with its reverse, Mitchell et al., Sampling Permutations
for Shapley Value Estimation (2022).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

import torch
from torch import Tensor

Order = tuple[str, ...]

Total = Callable[[frozenset[str]], Tensor]
"""What is left with these parts aligned: float64 [S], summed over the tokens of each sequence."""


def draw_orders(parts: Sequence[str], count: int, seed: int) -> list[Order]:
    """Orders of all parts, at random; each stands for its reverse, too."""
    drawn = random.Random(seed)
    return [tuple(drawn.sample(parts, len(parts))) for _ in range(count)]


def sets_of(orders: Sequence[Order]) -> list[frozenset[str]]:
    """What is aligned at some time in these orders and their reverses, each set once."""
    both = (way for order in orders for way in (order, order[::-1]))
    return list(dict.fromkeys(aligned for way in both for aligned in _prefixes(way)))


def _prefixes(order: Order) -> list[frozenset[str]]:
    return [frozenset(order[:count]) for count in range(len(order) + 1)]


def losses(total: Total, orders: Sequence[Order]) -> dict[str, Tensor]:
    """What the total loses by each part: float64 [orders, S], the mean of an order and its reverse."""
    pairs = [(_losses(total, order), _losses(total, order[::-1])) for order in orders]
    return {
        part: torch.stack([(there[part] + back[part]) / 2 for there, back in pairs])
        for part in sorted(orders[0])
    }


def _losses(total: Total, order: Order) -> dict[str, Tensor]:
    totals = [total(aligned) for aligned in _prefixes(order)]
    return {
        part: before - after
        for part, before, after in zip(order, totals[:-1], totals[1:], strict=True)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a part has of a mean over tokens; negative where it adds to it."""

    part: str
    value: float

    error_of_orders: float
    """Its standard error, since not all orders were drawn."""

    error_of_prompts: float
    """Its standard error, since sequences differ."""

    @property
    def stands_out(self) -> bool:
        """Whether it is more than twice both errors together."""
        return abs(self.value) > 2 * hypot(self.error_of_orders, self.error_of_prompts)


def share(part: str, lost: Tensor, tokens: Tensor) -> Share:
    """lost: float64 [orders, S], two orders at least, as `losses` has it. tokens: float64 [S]."""
    of_orders = lost.sum(1) / tokens.sum()
    return Share(
        part=part,
        value=float(of_orders.mean()),
        error_of_orders=float(of_orders.std()) / len(of_orders) ** 0.5,
        error_of_prompts=standard_error(lost.mean(0), tokens),
    )


def standard_error(sums: Tensor, tokens: Tensor) -> float:
    """The standard error of the mean over all tokens: those of one sequence are not independent.

    sums, tokens: float64 [S] of each sequence. Source: the ratio estimator, Cochran, Sampling
    Techniques (1977).
    """
    apart = sums - tokens * sums.sum() / tokens.sum()
    count = len(sums)
    return float((count / max(count - 1, 1) * apart.square().sum()).sqrt() / tokens.sum())
