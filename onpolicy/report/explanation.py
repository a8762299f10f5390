"""One HTML page of what `onpolicy explain` found: layers by operators, and the tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any


def document(heading: str, text: str, *sections: tuple[str, str]) -> str:
    """One HTML page that opens without a network.

    text: what was printed. sections: (heading, HTML) of each.
    """
    folder = files("onpolicy.report")
    style = "".join(
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "explanation.css")
    )
    body = "".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>onpolicy explain</title>'
        f"<style>{style}</style><h1>{heading}</h1>"
        f"<section><pre>{escape(text)}</pre></section>{body}</html>\n"
    )


Result = dict[str, Any]

STEPS = 5
"""Shades of a colour; the palest is still one."""

LARGEST, SMALLEST = 0.0, -8.0
"""log10 of the differences between log-probabilities that get the darkest and the palest shade."""

_LAYER = re.compile(r"^layers\.(\d+)\.?(.*)$")


def render(result: Result, text: str) -> str:
    """The page; `text`: what was printed."""
    return document(
        "Where the engines part",
        text,
        ("Operators by layers", f"{_legend()}{''.join(_heat_map(result['sites']))}"),
        (
            "Tokens of the responses, by the difference between their log-probabilities",
            "".join(_responses(result["responses"])),
        ),
    )


def _legend() -> str:
    return (
        '<p><span class="own s5">&nbsp;</span> gives other bits for equal inputs '
        '<span class="given s5">&nbsp;</span> was given other inputs '
        '<span class="same">&nbsp;</span> no row differs; the darker, the more rows</p>'
    )


def _heat_map(sites: Sequence[Result]) -> Iterator[str]:
    """A row for each layer and one for what is in none; a column for each operator of a layer."""
    cells: dict[str, dict[str, Result]] = {}
    for site in sites:
        module, operator, number = site["site"]
        layer, within = _place(module)
        again = f" ({number + 1})" if number else ""
        cells.setdefault(layer, {})[f"{within} {operator}{again}".strip()] = site
    for is_layer in (True, False):
        rows = {name: row for name, row in cells.items() if name.isdigit() == is_layer}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        yield "<table class=heat><tr><th>" + ("layer" if is_layer else "")
        yield "".join(f"<th><span>{escape(column)}</span>" for column in columns)
        for name, row in rows.items():
            yield f"<tr><th>{escape(name)}" + "".join(_cell(row.get(c)) for c in columns)
        yield "</table>"


def _place(module: str) -> tuple[str, str]:
    """(layer or "", the rest of the name)"""
    found = _LAYER.match(module)
    return (found[1], found[2]) if found else ("", module)


def _cell(site: Result | None) -> str:
    if site is None:
        return "<td>"
    module, operator, _ = site["site"]
    own, made, rows = site["own"], site["outputs_differ"], site["rows"]
    kind, count = ("own", own) if own else ("given", max(made, site["inputs_differ"]))
    told = f"{operator} of {module}: of {rows} rows {made} differ, {own} of them for equal inputs"
    shade = f"{kind} s{math.ceil(STEPS * count / rows)}" if count else "same"
    return f'<td class="{shade}" title="{escape(told)}">{count or ""}'


def _responses(responses: Sequence[Result]) -> Iterator[str]:
    for number, response in enumerate(responses):
        yield f"<p>sequence {number}</p><p class=tokens>"
        for token, *pair in zip(*(response[key] for key in _COLUMNS), strict=True):
            yield _token(token, *pair)
        yield "</p>"


_COLUMNS = ("tokens", "rollout_log_probs", "train_log_probs")


def _token(token: int, rollout: float, train: float) -> str:
    difference = abs(rollout - train)
    shade = "same"
    if difference != 0:  # NaN is a difference, too
        part = 1.0
        if math.isfinite(difference):
            part = (math.log10(difference) - SMALLEST) / (LARGEST - SMALLEST)
        shade = f"own s{min(STEPS, max(1, math.ceil(STEPS * part)))}"
    told = f"rollout {rollout!r}, train {train!r}"
    return f'<span class="{shade}" title="{told}">{token}</span> '
