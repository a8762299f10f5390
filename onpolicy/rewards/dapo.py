r"""Rule of DAPO-Math-17k: the response's last "Answer: ..." must be the label.

It is verl's `math_dapo` (verl/utils/reward_score/math_dapo.py, without `strict_box_verify`), which
comes from Minerva's rule by way of lm-evaluation-harness: both texts are normalised, in the same
steps and in the same order, and must then be equal. The score is 1 or -1. Only the last 300
characters of a response are read.
"""

import re

_TAIL = 300
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_NO_ANSWER = "[INVALID]"

_REPLACED = {
    "an ": "", "a ": "", ".$": "$", r"\$": "", r"\ ": "", " ": "", "mbox": "text",
    r",\text{and}": ",", r"\text{and}": ",", r"\text{m}": r"\text{}",
}  # fmt: skip
_DROPPED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples",
    r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
_REWRITTEN = (
    (r".*?\$(.*?)\$.*", r"$\1$"),  # what stands between the first dollar signs
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
)


def score(response: str, label: str) -> dict[str, float]:
    """Return `score` 1.0 or -1.0, and `answered`: whether there was an answer to compare."""
    answers = _answers(response)
    found = normalize(answers[-1] if answers else _NO_ANSWER)
    is_right = found == normalize(label)
    return {"score": 1.0 if is_right else -1.0, "answered": float(bool(answers))}


def answer(response: str) -> str:
    """Return the last answer, normalised; empty if there is none."""
    answers = _answers(response)
    return normalize(answers[-1]) if answers else ""


def check_label(label: str) -> None:
    """Raise ValueError for a label that "Answer: " followed by the label itself does not match."""
    if not normalize(label):
        raise ValueError("nothing is left of it after normalisation")
    if normalize(label) == _NO_ANSWER:
        raise ValueError("a response without an answer would be right")
    if score(f"Answer: {label}", label)["score"] != 1.0:
        raise ValueError("the response 'Answer: ' with the label after it would be wrong")


def _answers(response: str) -> list[str]:
    return _ANSWER.findall(response[-_TAIL:])


def normalize(answer: str) -> str:
    """Return a canonical form of a short mathematical answer. Example: '$1,234$ dollars' -> '1234'"""
    answer = answer.split("=")[-1]
    for text, replacement in _REPLACED.items():
        answer = answer.replace(text, replacement)
    for text in _DROPPED:
        answer = answer.replace(text, "")
    for pattern, form in _REWRITTEN:
        answer = re.sub(pattern, form, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
