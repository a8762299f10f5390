r"""The rule of DAPO-Math-17k: the response's last "Answer: ..." must be the label.

Source: BytedTsinghua-SIA/DAPO, eval of the `math_dapo` reward (Minerva-style normalisation). Scores
1 and -1. Looks at the last 300 characters only, as the original does.
"""

import re

_TAIL = 300
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_DROPPED = (
    "an ", "a ", ".$", "\\$", r"\ ", " ", "mbox", ",\\text{and}", "\\text{and}", "\\text{s}",
)  # fmt: skip
_UNITS = re.compile(
    r"(square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|"
    r"degrees|cm|gm|pounds|meters|meals|edges|students|childrentickets|multiples|\\text\{.*?\})"
)


def score(response: str, label: str) -> dict[str, float]:
    """`score` 1.0 or -1.0, and `answered`: whether there was an answer to compare."""
    answers = _answers(response)
    correct = bool(answers) and normalize(answers[-1]) == normalize(label)
    return {"score": 1.0 if correct else -1.0, "answered": float(bool(answers))}


def answer(response: str) -> str:
    """The last answer, normalised; empty if there is none."""
    answers = _answers(response)
    return normalize(answers[-1]) if answers else ""


def _answers(response: str) -> list[str]:
    return _ANSWER.findall(response[-_TAIL:])


def check_label(label: str) -> None:
    """Raise ValueError if nothing is left of the label after normalisation."""
    if not normalize(label):
        raise ValueError("nothing is left of it after normalisation")


def normalize(answer: str) -> str:
    """A canonical form of a short mathematical answer. Example: '$1,234$ dollars' -> '1234'"""
    answer = answer.split("=")[-1]
    for text in _DROPPED:
        answer = answer.replace(text, "")
    answer = _UNITS.sub("", answer)
    boxed = re.search(r"\\boxed\{(.*)\}", answer)
    answer = boxed.group(1) if boxed else answer
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{\[])", r"sqrt{\2}", answer)
    answer = answer.replace("$", "").strip().rstrip(".")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer
