"""One HTML page of what `onpolicy explain --attribution` measured: a bar for each contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

Result = dict[str, Any]


def render_attribution(result: Result, text: str) -> str:
    """The page; `text`: what was printed."""
    style = files("onpolicy.report").joinpath("page.css").read_text(encoding="utf-8")
    style += files("onpolicy.report").joinpath("explanation.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>onpolicy explain</title>'
        f"<style>{style}</style><h1>What makes the engines differ</h1>"
        f"<section><pre>{escape(text)}</pre></section>"
        "<section><h2>k3 by what is aligned</h2><table class=bars>"
        f"{''.join(_bars(result['rows']))}</table></section></html>\n"
    )


def _bars(rows: Sequence[Result]) -> Iterator[str]:
    largest = max(row["k3_kl_mean"] for row in rows) or 1.0
    for row in rows:
        width = 100 * row["k3_kl_mean"] / largest
        told = f"{row['num_mismatched_tokens']} of {row['num_compared_tokens']} tokens differ"
        yield (
            f"<tr><th>{escape(row['name'])}<td>{row['k3_kl_mean']:.2g}"
            f'<td class=bar title="{told}"><span class="own s4" style="width:{width:.1f}%">&nbsp;</span>'
        )
