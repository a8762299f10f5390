"""Grammars that the text of an answer must follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["regex", "json_schema", "structural_tag"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Grammar:
    """A grammar that an answer must follow as text."""

    kind: GrammarKind

    text: str
    """A regular expression that matches the whole answer, a JSON schema, or a structural tag in JSON,
    which places texts and schemas in the answer
    (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html)."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer once it is complete, and never earlier; at least one."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GrammarSpan:
    """Tokens of a trajectory that were sampled under a grammar, from the grammar's start on."""

    grammar: Grammar
    start: int
    """Index of the first such token among all tokens of the trajectory."""
    end: int
