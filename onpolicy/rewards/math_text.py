r"""Extraction of an answer's text from a response or a label, prepared for math-verify's LaTeX
reader.

That reader takes adjacent terms for a product: 1 000 is 1 * 0 to it, 3 1/2 is 2, pi is i * p.
`as_latex` writes such text as the LaTeX that it means, and leaves all other text alone.
"""

import re
from collections.abc import Callable
from math import inf, log10

_SPACE = r"(?:\\[,;:!> ]|[ ~\u00a0\u2009\u202f])"
_THOUSANDS = rf"(?<![\d.,])\d{{1,3}}(?:{_SPACE}\d{{3}})+(?!\d)"
_NAMES = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|ln|log|exp|pi"
_CHARACTERS: dict[str, str | int | None] = {
    "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "·": r"\cdot ", "\u2013": "-",
    "½": r"\frac{1}{2}", "€": "", "£": "", "¥": "",
}  # fmt: skip

_Replacement = str | Callable[[re.Match[str]], str]
_REWRITTEN: tuple[tuple[str, _Replacement], ...] = (
    (_THOUSANDS, lambda number: re.sub(_SPACE, "", number[0])),
    (rf"(?<![\d.,/^_{{])(\d+){_SPACE}+(\d+)/(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),  # a mixed number
    (r"^([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d+)$", r"\1\\times 10^{\2}"),
    (r"\*\*", "^"),
    (r"\^(-\d+)", r"^{\1}"),
    (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
)
_REWRITTEN_OUTSIDE_LATEX = (
    (rf"(?<![A-Za-z])({_NAMES})(?![A-Za-z])", r"\\\1 "),
    (r"^([-+]?[\d.,/]+) ((?!per|pct)[A-Za-z]{3,}(?: [A-Za-z]{3,})*)$", r"\1\\text{ \2}"),  # a unit
)

_TOWER = re.compile(r"\d+(?:\s*(?:\^|\*\*)[\s{(]*\d+)+")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_MOST_DIGITS = 1e5
_LARGEST_FACTORIAL = 25_000
"""The largest n whose factorial is computed: 25,000! has 99,094 digits."""

_FLOAT_DIGITS = 300

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_INTRODUCTION = re.compile(r"(?i)####|\banswer(?:\s+is)?\s*:|\banswer\s+is\b")
_DELIMITED = re.compile(r"\$(?=\S)[^$]*(?<=\S)\$(?!\d)|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_COMMAND_WITH_TEXT = r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname|begin|end)\s*\{[^{}]*\}"
_WORDS = re.compile(
    rf"{_COMMAND_WITH_TEXT}|\\[A-Za-z]+|\b(?:and|or|{_NAMES}|sqrt)\b|([A-Za-z]{{2,}})"
)
_LETTER = r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])"
_ATOM = rf"(?:{_COMMAND_WITH_TEXT}|\\[A-Za-z]+|\\[^A-Za-z]|{_LETTER}|[^\sA-Za-z\\])"
_FORMULA = re.compile(rf"(?<!\S)(?![aAI]\s){_ATOM}(?:\s*{_ATOM})*")


def last_box(response: str) -> str | None:
    r"""Return the content of the last \boxed{} or \fbox{}, or None if there is none.

    An unclosed box gives an empty text, since nobody knows where the answer would have ended. A box
    without braces gives everything up to white space or a dollar sign.
    """
    boxes = list(_BOX.finditer(response))
    if not boxes:
        return None
    start = boxes[-1].end()
    if response[start : start + 1] != "{":
        return re.split(r"[\s$]", response[start:], maxsplit=1)[0]
    depth = 0
    for brace in _BRACE.finditer(response, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return response[start + 1 : brace.start()]
    return ""


def introduced(text: str) -> str:
    """Return the rest of the line after the last "answer is", "answer:" or "####"; empty without
    one."""
    introductions = list(_INTRODUCTION.finditer(text))
    rest = text[introductions[-1].end() :].strip() if introductions else ""
    return rest.splitlines()[0] if rest else ""


def words(text: str) -> list[str]:
    """Return the words of text other than LaTeX, function names, "and" and "or"."""
    return [word[1] for word in _WORDS.finditer(_DELIMITED.sub("", text)) if word[1]]


def is_delimited(text: str) -> bool:
    r"""Return whether text holds a formula between $...$, \(...\) or \[...\]."""
    return bool(_DELIMITED.search(text))


def delimited(text: str) -> str:
    """Return text with dollar signs around its formulas, if it has LaTeX and none of it is delimited."""
    if "\\" not in text or is_delimited(text):
        return text
    return _FORMULA.sub(_with_dollars, text)


def _with_dollars(formula: re.Match[str]) -> str:
    bare = formula[0].rstrip(".,;:!?*")
    return (
        f"${as_latex(bare)}${formula[0][len(bare) :]}"
        if re.search(r"\\[A-Za-z]", bare)
        else formula[0]
    )


def as_latex(text: str) -> str:
    """Return a number, a formula or a few words as LaTeX, without the decoration around an answer."""
    text = re.sub(r"^(?:=|≈|\\approx)\s*", "", text.strip().strip("*`").strip())
    text = re.sub(r"(?<!\.)\.$", "", text).translate(str.maketrans(_CHARACTERS)).strip()
    outside = () if "\\" in text else _REWRITTEN_OUTSIDE_LATEX
    for pattern, replacement in (*_REWRITTEN, *outside):
        text = re.sub(pattern, replacement, text)
    return text


def is_beyond(text: str) -> bool:
    """Return whether a text holds a power, a tower of powers or a factorial of more than a hundred
    thousand digits, such as 9^{9^{9^9}}, which cannot be computed in time."""
    if any(float(number) > _LARGEST_FACTORIAL for number in _FACTORIAL.findall(text)):
        return True
    for tower in _TOWER.findall(text):
        *lower, exponent = map(float, re.findall(r"\d+", tower))
        for number in reversed(lower):
            digits = exponent * log10(max(number, 1.0))
            if digits > _MOST_DIGITS:
                return True
            exponent = number**exponent if digits < _FLOAT_DIGITS else inf
    return False
