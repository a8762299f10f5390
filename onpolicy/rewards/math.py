r"""The response's last answer must be mathematically equal to the label (math-verify).

Understands LaTeX and plain expressions. If there is a \boxed{}, the last one is the answer.
"""

import logging
from functools import cache
from typing import Any

from math_verify import parse, verify


def score(response: str, label: str) -> float:
    """1.0 if the answer is equal to the label, else 0.0."""
    answer = response[max(response.rfind(r"\boxed"), 0) :]
    found = _parse(answer)
    return float(verify(_parse_label(label), found, timeout_seconds=None))


def check_label(label: str) -> None:
    """Raise ValueError if math-verify finds no expression in the label."""
    if all(isinstance(found, str) for found in _parse_label(label)):
        raise ValueError("math-verify finds no mathematical expression in it")


def _parse_label(label: str) -> list[Any]:
    return _parse(label) or _parse(f"${label}$")


def _parse(text: str) -> list[Any]:
    _be_quiet()
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions


@cache
def _be_quiet() -> None:
    """The scorer's worker process keeps the time limit; math-verify's own needs signals, and its absence
    is announced at every call."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
