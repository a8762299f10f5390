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

ANSWER = "answer"
"""What a rule names the text that it read of a response."""

Result = dict[str, Any]
"""Numbers by their names, and maybe an answer."""


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
            _rule = _with_answer(rm_type)
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


def _with_answer(name: str) -> Callable[[str, str], dict[str, Any]]:
    """A rule that also says under "answer" what it compares."""
    rule = load_rule(name)

    def score(response: str, label: str) -> dict[str, Any]:
        result = rule.score(response, label)
        parts = result if isinstance(result, dict) else {"score": result}
        return {**parts, ANSWER: rule.answer(response)}

    return score


def score(*arguments: Any) -> Result | Failure:
    """What the rule says: the reward under "score", further numbers, and maybe a text under "answer"."""
    return _rule if isinstance(_rule, Failure) else _scored(_rule, *arguments)


def score_by(response: str, label: str, rule: str) -> Result | Failure:
    """What another rule than the one that was loaded says."""
    return _scored(_with_answer(rule), response, label)


def _scored(rule: Callable[..., Any], *arguments: Any) -> Result | Failure:
    try:
        result = rule(*arguments)
    except BaseException as error:  # SystemExit too
        return Failure(reason=f"raised {describe(error)}", traceback=traceback.format_exc())
    try:
        return _numbers(result)
    except Exception as error:  # its own __float__ may raise anything
        return Failure(reason=f"returned {_shown(result)}: {error}")


def _numbers(result: Any) -> Result:
    parts = {**result} if isinstance(result, dict) else {"score": result}
    answer = {ANSWER: parts.pop(ANSWER)} if isinstance(parts.get(ANSWER), str) else {}
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
    return numbers | answer


def _shown(result: Any) -> str:
    try:
        text = repr(result)
    except Exception as error:  # its own __repr__ raises, or it is an integer of too many digits
        return f"a {type(result).__name__} that cannot be shown ({error})"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"
