"""Tables of records in a page, between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, stdev

STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Two-sided 95 % quantile of Student's t for the mean of so many runs."""


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(columns)
    return line(titles) + "|---" * len(titles) + "|\n" + "".join(map(line, rows))


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def interval(values: list[float], form: str = ".2f") -> str:
    """Example: 0.93 +- 0.04. Empty for one value."""
    if len(values) < 2:
        return ""
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{fmean(values):{form}} +- {half:{form}}"


def between(page: str, mark: str, text: str) -> str:
    """The page with the text between `<!-- MARK: begin -->` and `<!-- MARK: end -->`."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->\n"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"
