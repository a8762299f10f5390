"""Rules that score responses: one file per rule.

A rule is a module with `score(response: str, label: str) -> float | dict[str, float]`; a dict holds
the reward under "score" and further numbers to log. `answer(response: str) -> str` returns the text
that is compared with the label, empty if there is none. `check_label(label)` raises ValueError for
a label the rule cannot read; it is called in the run's own process and must be quick. A rule that
cannot know without scoring also has `trials(label) -> dict[str, float]`: responses, and the score
each must get; and `form(label) -> str`, a key that labels share whose trials have the same outcome.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ANSWER = "answer"

Numbers = dict[str, Any]
"""The reward under "score", further numbers, optionally under ANSWER the text that was compared,
and under "token_weights" the weights of the sampled tokens by the term of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a sample has no reward."""

    reason: str
    traceback: str = ""

    in_loading: bool = False
    """Whether the rule itself cannot be used, not just on this sample."""

    is_late: bool = False
    may_pass: bool = False
    """Whether another process may give an answer: this one was late, or its process died."""


Answers = Callable[[], list[Numbers | Failure]]
"""A function that waits for the results, one per sample, in the order of the samples."""


def load_rule(name: str) -> ModuleType:
    """Return the module of the rule `name`: one of --rm-type, or `reasoning_gym`."""
    return importlib.import_module(f"onpolicy.rewards.{name}")
