"""What runs in a scoring process: one rule, loaded once, whose results become numbers or a failure.

Whatever a rule of the user's own does here (raise, exit, crash, return nonsense) ends this process at
worst. It imports nothing heavy, since every process that was ended is replaced by a new one.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onpolicy.errors import ConfigError
from onpolicy.rewards import load_rule
from onpolicy.system.user_functions import describe, load_function

FLAG = "--custom-rm-path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no reward."""

    reason: str
    """One line."""

    traceback: str = ""

    in_loading: bool = False
    """Whether the rule itself cannot be used, and not just this sample."""


_rule: Callable[..., Any] | Failure = Failure(reason="no rule was loaded", in_loading=True)


def load(rm_type: str, custom_rm_path: str, others: Sequence[str] = ()) -> None:
    """Keep the rule for the samples to come, if the run has one, and import `others`."""
    global _rule
    for name in others:
        load_rule(name)
    try:
        if custom_rm_path:
            _rule = _load_own(custom_rm_path)
        elif rm_type:
            _rule = load_rule(rm_type).score
    except ConfigError as error:
        _rule = Failure(reason=str(error), in_loading=True)


def _load_own(path: str) -> Callable[..., Any]:
    function = load_function(path, FLAG)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{FLAG}={path}: is async. It is called for one sample at a time in a worker process; make "
            "it a plain function."
        )
    return function


def score(*arguments: Any) -> dict[str, float] | Failure:
    """What the rule says: the reward under "score", and further numbers."""
    return _rule if isinstance(_rule, Failure) else _scored(_rule, *arguments)


def score_by(response: str, label: str, rule: str) -> dict[str, float] | Failure:
    """What another rule than the one that was loaded says."""
    return _scored(load_rule(rule).score, response, label)


def _scored(rule: Callable[..., Any], *arguments: Any) -> dict[str, float] | Failure:
    try:
        result = rule(*arguments)
    except BaseException as error:  # SystemExit too
        return Failure(reason=f"raised {describe(error)}", traceback=traceback.format_exc())
    try:
        return _numbers(result)
    except Exception as error:  # its own __float__ may raise anything
        return Failure(reason=f"returned {_shown(result)}: {error}")


def _numbers(result: Any) -> dict[str, float]:
    parts = result if isinstance(result, dict) else {"score": result}
    if "score" not in parts:
        raise ValueError('a dict must hold the reward under "score"')
    if not all(isinstance(name, str) for name in parts):
        raise ValueError("the names in a dict must be text")
    if any(
        isinstance(value, (str, bytes)) or not hasattr(value, "__float__")
        for value in parts.values()
    ):
        raise ValueError("it must be a number, or a dict of numbers")
    numbers = {name: float(value) for name, value in parts.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError("a reward must be finite")
    return numbers


def _shown(result: Any) -> str:
    try:
        text = repr(result)
    except Exception as error:  # its own __repr__ raises, or it is an integer of too many digits
        return f"a {type(result).__name__} that cannot be shown ({error})"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"
