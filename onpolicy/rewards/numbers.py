"""Conversion of the results of rules, functions and services into numbers."""

from __future__ import annotations

import math
from typing import Any

from onpolicy.rewards import ANSWER, Failure, Numbers
from onpolicy.token_weights import TOKEN_WEIGHTS, by_term, checked_weights
from onpolicy.types import Term


def each_of(results: Any, count: int) -> list[Any] | Failure:
    """Return the list of results for `count` samples, or a Failure if it is no such list."""
    try:
        listed = [] if isinstance(results, (str, bytes, dict)) else list(results)
    except Exception:  # a number, or its own __iter__ raises anything
        listed = []
    if len(listed) == count:
        return listed
    rule = f"it must be a list with one result for each of the {count} samples"
    return Failure(reason=f"returned {shown(results)}: {rule}")


def numbers_or_failure(result: Any, num_sampled: int | None = None) -> Numbers | Failure:
    """Return the result for one sample as numbers, or a Failure. `num_sampled`: the sample's number
    of tokens; None if the rule does not get the tokens."""
    try:
        return _numbers(result, num_sampled)
    except Exception as error:  # its own __float__ may raise anything
        return Failure(reason=f"returned {shown(result)}: {error}")


def _numbers(result: Any, num_sampled: int | None) -> Numbers:
    parts = {**result} if isinstance(result, dict) else {"score": result}
    weights = {}
    if TOKEN_WEIGHTS in parts:
        weights = {TOKEN_WEIGHTS: _weights(parts.pop(TOKEN_WEIGHTS), num_sampled)}
    answer = {ANSWER: str(parts.pop(ANSWER))} if isinstance(parts.get(ANSWER), str) else {}
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
    return numbers | answer | weights


def _weights(given: Any, num_sampled: int | None) -> dict[Term, list[float]]:
    if num_sampled is None:
        raise ValueError(f"{TOKEN_WEIGHTS} are of functions alone, which are told the tokens")
    return {
        term: checked_weights(
            f"{TOKEN_WEIGHTS}[{term!r}]", values, num_sampled, "the sampled tokens"
        )
        for term, values in by_term(given).items()
    }


def shown(result: Any) -> str:
    """Return a short representation of any value, for messages."""
    try:
        text = repr(result)
    except Exception as error:  # its own __repr__ raises, or it is an integer of too many digits
        return f"a {type(result).__name__} that cannot be shown ({error})"
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"
