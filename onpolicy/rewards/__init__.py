"""Rules that score responses: one file per rule.

A rule is a function `score(response: str, label: str) -> float | dict[str, float]`; a dict holds
the reward under "score" and further numbers to log. `answer(response: str) -> str` is what it compares
with the label, empty if there is nothing. `check_label(label)` raises ValueError for a label the rule
cannot read.
"""

from __future__ import annotations

import importlib
from types import ModuleType

RULES = ("math", "dapo", "exact")


def load_rule(name: str) -> ModuleType:
    """The module of the rule `name`, one of RULES."""
    return importlib.import_module(f"onpolicy.rewards.{name}")
