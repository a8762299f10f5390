"""One HTML page of what `onpolicy explain --attribution` measured: a bar for each contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from onpolicy.report.document import document

Result = dict[str, Any]


def render_attribution(result: Result, text: str) -> str:
    """The page; `text`: what was printed."""
    bars = f"<table class=bars>{''.join(_bars(result['rows']))}</table>"
    return document("What makes the engines differ", text, ("k3 by what is aligned", bars))


def _bars(rows: Sequence[Result]) -> Iterator[str]:
    largest = max(row["k3_kl_mean"] for row in rows) or 1.0
    for row in rows:
        width = 100 * row["k3_kl_mean"] / largest
        told = f"{row['num_mismatched_tokens']} of {row['num_compared_tokens']} tokens differ"
        yield (
            f"<tr><th>{escape(row['name'])}<td>{row['k3_kl_mean']:.2g}"
            f'<td class=bar title="{told}"><span class="own s4" style="width:{width:.1f}%">&nbsp;</span>'
        )
