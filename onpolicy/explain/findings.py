"""Findings of `onpolicy explain`, in plain words and as one HTML page of layers and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS

Result = dict[str, Any]

VERDICTS = {
    "other weights": "The two sides hold other weights there: not all of them were pushed.",
    "other keys": "The two sides attend to other keys or values.",
    "depends on the batch": "The operator gives this row other bits in the two shapes.",
    "rollout differs": "The rollout engine did not compute what the operator gives alone.",
    "trainer differs": "The trainer did not compute what the operator gives alone.",
    "not reproduced": "Alone, the operator gives the bits of either side, and both are the same.",
}

STEPS = 5
"""The number of shades of a colour."""

LARGEST, SMALLEST = 0.0, -8.0
"""log10 of the log-probability differences that get the darkest and the palest shade."""

_LAYER = re.compile(r"^layers\.(\d+)\.?(.*)$")


def told(result: Result) -> str:
    """Return a few lines for a terminal."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    yield (
        f"{result['num_mismatched_tokens']} of {result['num_compared_tokens']} tokens differ; k3 "
        f"{result['k3_kl_mean']:.2g}, largest difference {result['max_abs_diff']:.2g}"
    )
    if result["only_in_one"]:
        yield f"Not compared, as one side has no counterpart: {', '.join(result['only_in_one'])}."
    source = result["source"]
    if source is None:
        rows = sum(site["rows"] for site in result["sites"])
        yield f"No row differs, of {rows} that operators of {len(result['sites'])} sites computed."
        return
    if token := result["first_token"]:
        yield (
            f"First: sequence {token['sequence']}, response position {token['response_position']}: "
            f"rollout={token['rollout_log_prob']!r}, train={token['train_log_prob']!r}"
        )
    else:
        yield f"No log-probability differs, but rows do, first in sequence {source['sequence']}."
    yield from _of_source(source)
    yield from _of_ranks(result)
    if source["rollout_shape"]:
        yield (
            f"Shape of the call: {list(source['rollout_shape'])} in the rollout, "
            f"{list(source['train_shape'])} in the trainer."
        )
    if proof := result["proof"]:
        yield from _of_proof(proof)
    yield from _flips(result["sites"])
    yield from _others(result["sites"], source)


def _of_source(source: Result) -> Iterator[str]:
    name, where = source["name"], f"at position {source['position']} of the sequence"
    before = source["before"]
    last = f"{before[1]} of {before[0]}" if before else "nothing"
    yield {
        "operator": f"The {name} gives other bits for the same input, {where}.",
        "key/value cache": f"The {name} reads other keys or values from the cache than were computed, "
        f"{where}.",
        "between operators": f"The {name} is given another input, {where}, and all before it agrees, "
        f"{last} last: what lies between them differs.",
        "not computed": f"The rollout engine never computed the {name}, {where}, after this prefix: it "
        "read another one from its cache.",
    }[source["cause"]]


def _of_ranks(result: Result) -> Iterator[str]:
    source = result["source"]
    for side, own, ranks in (
        ("rollout", source["ranks"], result["rollout_ranks"]),
        ("trainer", source["train_ranks"], result["train_ranks"]),
    ):
        which = "all ranks" if len(own) == ranks else f"rank {', '.join(map(str, own))} alone"
        if ranks > 1:
            yield f"So it is on {which} of the {side}'s {ranks} tensor-parallel ranks."


def _of_proof(proof: Result) -> Iterator[str]:
    d = proof["difference"]
    yield (
        f"Of that row {d['different']} of {d['elements']} numbers differ, by up to {d['max_ulp']} ulp "
        f"({d['max_abs']:.2g})."
    )
    for key, text in (
        ("in_rollout_shape", "on the rollout's input, in its shape, it gives the rollout's bits"),
        ("in_train_shape", "on the trainer's input, in its shape, it gives the trainer's bits"),
        ("same_in_both", "it gives this row the same bits in both shapes"),
    ):
        answer = {True: "yes", False: "no", None: "not run"}[proof[key]]
        yield f"  The operator alone: {text}: {answer}"
    yield VERDICTS[proof["verdict"]]


def _flips(sites: list[Result]) -> Iterator[str]:
    for site in sites:
        if site["site"][1] == CHOSEN_EXPERTS and site["outputs_differ"]:
            yield (
                f"The router {site['site'][0]} chose other experts for {site['outputs_differ']} of "
                f"{site['rows']} rows."
            )


def _others(sites: list[Result], source: Result) -> Iterator[str]:
    others = [s for s in sites if s["site"] != source["site"] and s["site"][1] != CHOSEN_EXPERTS]
    own = [s for s in others if s["own"]]
    if own:
        yield "Other operators that give other bits for equal inputs (rows):"
        yield from (
            f"  {s['site'][1]} of {s['site'][0]}: {s['own']} of {s['rows']}" for s in own[:12]
        )


def render(result: Result, text: str) -> str:
    """Return the page; `text`: the printed lines."""
    return _document(
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
    """Yield tables with a row for each layer and one for modules outside layers; columns are
    operators."""
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
    """Return (layer or "", the rest of the name) of a module."""
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


def _document(heading: str, text: str, *sections: tuple[str, str]) -> str:
    """Return one HTML page that opens without a network.

    text: the printed lines. sections: (heading, HTML) of each.
    """
    sheets = files("onpolicy.report") / "page.css", files("onpolicy.explain") / "findings.css"
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    body = "".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>onpolicy explain</title>'
        f"<style>{style}</style><h1>{heading}</h1>"
        f"<section><pre>{escape(text)}</pre></section>{body}</html>\n"
    )
