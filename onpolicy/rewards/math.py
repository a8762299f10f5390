r"""The response's last answer must be mathematically equal to the label (math-verify).

Understands LaTeX and plain expressions. If there is a \boxed{}, the last one is the answer.
"""

import logging
from functools import cache, lru_cache
from typing import Any

from math_verify import parse, verify


def score(response: str, label: str) -> float:
    """1.0 if the answer is equal to the label, else 0.0."""
    return float(verify(_parse_label(label), _parse(_tail(response)), timeout_seconds=None))


def answer(response: str) -> str:
    r"""The answer as SymPy writes it, so that 0.5 and \frac{1}{2} are one; empty if there is none."""
    found = _parse(_tail(response))
    try:
        return str(found[0]) if found else ""
    except ValueError:  # a number with more digits than Python writes
        return str(found[-1])


def check_label(label: str) -> None:
    """Raise ValueError if math-verify finds no expression in the label."""
    if all(isinstance(found, str) for found in _parse_label(label)):
        raise ValueError("math-verify finds no mathematical expression in it")


def _tail(response: str) -> str:
    return response[max(response.rfind(r"\boxed"), 0) :]


def _parse_label(label: str) -> list[Any]:
    return _parse(label) or _parse(f"${label}$")


@lru_cache(maxsize=4)
def _parse(text: str) -> list[Any]:
    _be_quiet()
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions


@cache
def _be_quiet() -> None:
    """The scorer's worker process keeps the time limit; math-verify's own needs signals, and its absence
    is announced at every call."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
