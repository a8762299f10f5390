"""Counts of a check's comparisons, so that a green run also shows how much it compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.support.gpu.launches import last_launches

KEPT = 5
"""The most mismatching cases that are described; all of them are counted."""


@dataclass
class Tally:
    """Comparisons of one test: equality of bits, and errors against a bound."""

    cases: int = 0
    values: int = 0
    mismatched_cases: int = 0
    mismatched_values: int = 0
    largest_error: float = 0.0
    """Largest error / bound of the accuracy checks."""
    first: list[str] = field(default_factory=list)
    """Descriptions of the first mismatches."""

    def equal(self, got, want, case):
        """Compare bit for bit; NaN equals nothing."""
        self.cases += 1
        self.values += want.numel()
        if got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want):
            return
        self.mismatched_cases += 1
        if got.shape != want.shape or got.dtype != want.dtype:
            self.mismatched_values += want.numel()
            self._describe(f"{case}: {got.dtype} {tuple(got.shape)}, not {tuple(want.shape)}")
            return
        differs = got != want
        self.mismatched_values += int(differs.sum())
        largest = (got.double() - want.double()).abs().max().item()
        self._describe(
            f"{case}: {int(differs.sum())} of {want.numel()} differ, by up to {largest}; "
            f"{_first_of(differs, got, want)}"
        )

    def close(self, got, exact, bound, case):
        """Compare with a reference in higher precision: |got - exact| <= bound, elementwise."""
        self.cases += 1
        self.values += exact.numel()
        ratio = ((got.to(exact.dtype) - exact).abs() / bound).max().item()
        if ratio > self.largest_error or ratio != ratio:
            self.largest_error = ratio
        if not ratio <= 1:
            self.mismatched_cases += 1
            self.mismatched_values += 1
            beyond = ~((got.to(exact.dtype) - exact).abs() <= bound)
            place = _first_of(beyond, got, exact)
            self._describe(f"{case}: error is {ratio:.3g} times its bound; {place}")

    def require_none(self):
        """Fail unless something was compared and nothing differs."""
        assert self.cases > 0, "nothing was compared"
        assert self.mismatched_cases == 0, (
            f"{self.mismatched_cases} of {self.cases} cases differ: " + "; ".join(self.first)
        )

    def require_some(self):
        """Fail unless the check saw a difference; for negative controls."""
        assert self.mismatched_cases > 0, (
            f"none of {self.cases} cases differs: this check cannot tell stock kernels from aligned "
            "ones on this machine, so its green results prove nothing here"
        )

    def _describe(self, text):
        if len(self.first) < KEPT:
            kernels = last_launches()
            self.first.append(f"{text}; last kernels: {kernels}" if kernels else text)


def _first_of(differs, got, want):
    """Return the first row that differs, its differing columns, and the actual and expected values."""
    place = tuple(differs.nonzero()[0].tolist())
    if not place:
        return f"{got.item()!r}, not {want.item()!r}"
    columns = differs[place[:-1]].nonzero()[:, 0].tolist()
    rows = int(differs.flatten(0, -2).any(-1).sum()) if len(place) > 1 else 1
    where = (
        f"row {', '.join(map(str, place[:-1]))} (of {rows} such rows), " if len(place) > 1 else ""
    )
    return (
        f"first: {where}column {columns[0]} (of {len(columns)}, the last {columns[-1]}): "
        f"{got[place].item()!r}, not {want[place].item()!r}"
    )
