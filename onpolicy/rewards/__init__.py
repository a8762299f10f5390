"""Rules that score responses: one file per rule.

A rule is a function `score(response: str, label: str) -> float | dict[str, float]`; a dict holds
the reward under "score" and further numbers to log. `answer(response: str) -> str` is what it compares
with the label, empty if there is nothing. `check_label(label)` raises ValueError for a label the rule
cannot read; it is called in the run's own process and must be quick. A rule that cannot know without
scoring has `trials(label) -> dict[str, float]` too: responses, and what each must score; and
`form(label) -> str`, which labels share whose trials have one outcome.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ANSWER = "answer"

Numbers = dict[str, Any]
"""The reward under "score", further numbers, maybe under ANSWER the text that was compared, and under
"token_weights" the weights of the sampled tokens by the term of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no reward."""

    reason: str
    """One line."""

    traceback: str = ""

    in_loading: bool = False
    """Whether the rule itself cannot be used, and not just this sample."""

    is_late: bool = False
    """Whether there was no time left."""

    may_pass: bool = False
    """Whether another process may give an answer: this one was late, or its process died."""


Answers = Callable[[], list[Numbers | Failure]]
"""Waits for what samples were given, one by one, in their order."""


def load_rule(name: str) -> ModuleType:
    """The module of the rule `name`, one of those of --rm-type or `reasoning_gym`."""
    return importlib.import_module(f"onpolicy.rewards.{name}")
