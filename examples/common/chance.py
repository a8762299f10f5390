"""Exact tests of differences between a few runs, and their adjustment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from statistics import fmean


def exact_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the difference of means, over all ways to draw len(a) of the values of both."""
    values, found = [*a, *b], abs(fmean(a) - fmean(b))

    def apart(chosen: tuple[int, ...]) -> float:
        rest = [x for i, x in enumerate(values) if i not in chosen]
        return abs(fmean(values[i] for i in chosen) - fmean(rest))

    ways = list(combinations(range(len(values)), len(a)))
    return sum(apart(way) >= found - 1e-12 for way in ways) / len(ways)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p, in the order given (Scandinavian Journal of Statistics 6, 1979)."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean of paired differences, over all ways to turn their signs round."""
    found = abs(fmean(differences))
    ways = list(product((1, -1), repeat=len(differences)))
    apart = (abs(fmean(s * d for s, d in zip(way, differences, strict=True))) for way in ways)
    return sum(each >= found - 1e-12 for each in apart) / len(ways)
