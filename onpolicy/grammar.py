"""What the text of an answer must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["regex", "json_schema", "structural_tag"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Grammar:
    """What an answer must be as text."""

    kind: GrammarKind

    text: str
    """A regular expression that matches the whole answer, a JSON schema, or a structural tag in JSON,
    which says where texts and schemas stand in it
    (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html)."""

    stop_token_ids: tuple[int, ...]
    """The tokens that end an answer once it is complete, and never before; at least one."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GrammarSpan:
    """Tokens of a trajectory that were sampled within a grammar, from its beginning on."""

    grammar: Grammar
    start: int
    """The first one's place among all tokens of the trajectory."""
    end: int
