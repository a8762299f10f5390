"""Rule of problems from the reasoning-gym package: the dataset's own scorer.

The answer is the content of the last <answer> in the response, as in the package's own prompts, or
else the whole response.
"""

import json
from functools import cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn
from reasoning_gym.utils import extract_answer


def score(response: str, label: str) -> float:
    """Return the dataset's `score_answer`, mostly 0 to 1; `label` is a problem as JSON."""
    problem = json.loads(label)
    return float(_scorer(problem["name"])(answer(response), problem))


def answer(response: str) -> str:
    """Return the answer."""
    found = extract_answer(response)
    return response.strip() if found is None else str(found)


def check_label(label: str) -> None:
    """Raise ValueError for a label that is no problem."""
    problem = json.loads(label)
    if not isinstance(problem, dict) or not {"name", "answer", "metadata"} <= problem.keys():
        raise ValueError("it is no problem of reasoning-gym as JSON")


@cache
def _scorer(name: str) -> Any:
    return get_score_answer_fn(name)
