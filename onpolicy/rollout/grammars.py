"""Grammars that hold the text of an answer to a regex, a JSON schema or a structural tag."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from onpolicy.grammar import Grammar


def grammar_of(
    regex: str | None,
    json_schema: str | Mapping[str, Any] | None,
    stop_token_ids: Sequence[int],
    structural_tag: str | None = None,
) -> Grammar | None:
    """Return the grammar for whichever argument is given; None if none is.

    Raises ValueError for several, and TypeError for a regex that is not a text.
    """
    given = {"regex": regex, "json_schema": json_schema, "structural_tag": structural_tag}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)}: an answer is held to one of them. Leave one out.")
    stops = tuple(sorted(stop_token_ids))
    if structural_tag is not None:
        return Grammar(kind="structural_tag", text=structural_tag, stop_token_ids=stops)
    if regex is not None:
        if not isinstance(regex, str):
            raise TypeError(f"regex={regex!r:.80}: must be a text")
        return Grammar(kind="regex", text=regex, stop_token_ids=stops)
    if json_schema is None:
        return None
    # Not sorted: an object's properties come in the order of its schema.
    text = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
    return Grammar(kind="json_schema", text=text, stop_token_ids=stops)
