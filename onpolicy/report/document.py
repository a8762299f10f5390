"""What every page of `onpolicy explain` is made of: its style, what was printed, and sections."""

from __future__ import annotations

from html import escape
from importlib.resources import files


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
