"""What runs in a scoring process: rules, loaded once, whose results become numbers or a failure.

Whatever a rule of the user's own does here (raise, exit, crash, return nonsense) ends this process at
worst. It imports nothing heavy, since every process that was ended is replaced by a new one.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from onpolicy.errors import ConfigError
from onpolicy.rewards import ANSWER, Failure, Numbers, load_rule
from onpolicy.system.user_functions import describe, load_function

_rules: dict[str, Callable[..., Any] | Failure] = {}
"""Rules by name, and functions by path."""


def load(names: Sequence[str], paths: Sequence[str], flag: str) -> None:
    """Keep rules and functions for what is to come; `flag`: what names the functions, for messages."""
    for name in names:
        _rules[name] = _with_answer(name)
    for path in paths:
        try:
            _rules[path] = _load_own(path, flag)
        except ConfigError as error:
            _rules[path] = Failure(reason=str(error), in_loading=True)


def _load_own(path: str, flag: str) -> Callable[..., Any]:
    function = load_function(path, flag)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{flag}={path}: is async. It is called in a worker process, for one sample at a time or "
            "for one group; make it a plain function."
        )
    return function


def _with_answer(name: str) -> Callable[[str, str], Numbers]:
    """A rule that also says under "answer" what it compares."""
    rule = load_rule(name)

    def score(response: str, label: str) -> Numbers:
        result = rule.score(response, label)
        parts = result if isinstance(result, dict) else {"score": result}
        return {**parts, ANSWER: rule.answer(response)}

    return score


def score(rule: str, *arguments: Any) -> Numbers | Failure:
    """What a rule says: the reward under "score", and further numbers."""
    result = _result(rule, *arguments)
    return result if isinstance(result, Failure) else _numbers_or_failure(result)


def score_group(rule: str, samples: Sequence[Any]) -> list[Numbers | Failure] | Failure:
    """What a rule says of all samples of a prompt, one by one, in their order."""
    results = _result(rule, samples)
    if isinstance(results, Failure):
        return results
    try:
        listed = [] if isinstance(results, (str, bytes, dict)) else list(results)
    except Exception:  # a number, or its own __iter__ raises anything
        listed = []
    if len(listed) == len(samples):
        return [_numbers_or_failure(result) for result in listed]
    rule_of_lists = f"it must be a list with one result for each of the {len(samples)} samples"
    return Failure(reason=f"returned {_shown(results)}: {rule_of_lists}")


def _result(name: str, *arguments: Any) -> Any:
    """What the rule itself returns, or a Failure."""
    if name not in _rules:
        load([name], [], "")
    rule = _rules[name]
    if isinstance(rule, Failure):
        return rule
    try:
        return rule(*arguments)
    except BaseException as error:  # SystemExit too
        return Failure(reason=f"raised {describe(error)}", traceback=traceback.format_exc())


def _numbers_or_failure(result: Any) -> Numbers | Failure:
    try:
        return _numbers(result)
    except Exception as error:  # its own __float__ may raise anything
        return Failure(reason=f"returned {_shown(result)}: {error}")


def _numbers(result: Any) -> Numbers:
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
