r"""Rule `math`: the response's last answer must be mathematically equal to the label (math-verify).

If a response has a \boxed{}, the last one holds the answer, which is read as LaTeX. The label is
read in the same way: data sets have LaTeX without dollar signs, of which math-verify's plain-text
reader takes one number, so that 2 would be right for 2\sqrt{3}. A response without a box is read in
math-verify's own order: a final answer, or else the last formula or number. verl's `math_verify`
puts the label into \boxed{} too.

math-verify's LaTeX reader takes adjacent terms for a product: 1 000 is 1 * 0 to it, 3 1/2 is 2, pi
is i * p. `as_latex` writes such text as the LaTeX that it means, and leaves all other text alone.

A comparison may hang, and no signal handler interrupts it, since powers of powers are computed in
C: call `score` and `answer` in a process that can be killed.
"""

import logging
import re
from collections.abc import Callable
from functools import cache, lru_cache
from math import inf, log10
from typing import Any

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig
from sympy import Eq, Expr, N, UnevaluatedExpr, simplify, solve

_NEARLY = 1e-4
"""The largest relative difference of two equal numbers. math-verify alone rounds to decimal places,
where 1/2^98 and 1/2^99 are both 0."""

_FEWEST_WORDS_OF_PROSE = 3

_NUMBER = re.compile(r"-?(?:\d{1,15}(?:\.\d{1,9})?|\\[dt]?frac\{\d{1,9}\}\{[1-9]\d{0,8}\})")
_IS_THERE = re.compile(r"\w|\\[A-Za-z]|\{\}|[^\x00-\x7f]")
_GROWS = re.compile(r"\^|\*\*|!")
_DIGITS = str.maketrans("23456789", "1" * 8)
_UNLIKELY = "-31415926.53"
_MORE_THAN_A_NUMBER = re.compile(r"[A-Za-z\\√]|[(\[{].*,")
_ALL_TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())


def score(response: str, label: str) -> float:
    """Return 1.0 if the answer is equal to the label, else 0.0; also 0.0 for an answer that is too
    large to compute, if the label is not."""
    if is_beyond(_answer_in(response)) and not is_beyond(label):
        return 0.0
    gold, found = _read(label), _read_response(response)
    is_equal = verify(gold, found, timeout_seconds=None)
    return float(is_equal and not _is_equal_by_mistake(gold[0], found[0]))


def answer(response: str) -> str:
    r"""Return the answer as SymPy writes it (0.5 and \frac{1}{2} are one); empty if there is none."""
    if is_beyond(text := _answer_in(response)):
        return text
    found = _read_response(response)
    try:
        return str(found[0]) if found else ""
    except ValueError:  # a number with more digits than Python writes
        return str(found[-1])


def check_label(label: str) -> None:
    """Raise ValueError for a label that holds no answer, or that is a sentence."""
    text = introduced(label) or label
    if not _IS_THERE.search(as_latex(text)):
        raise ValueError("there is nothing in it to compare")
    if _is_prose(text) and re.search(r"\d|\\[A-Za-z]", text):
        raise ValueError("it is a sentence, and one of its numbers would be taken for the answer")


def trials(label: str) -> dict[str, float]:
    r"""Return responses and the score each must get: the label in a \boxed{}; none for a number.

    For powers of powers, whose value may never be computed, another number is there too: an
    expression equals itself without computing anything."""
    if _NUMBER.fullmatch(label):
        return {}
    right = {rf"\boxed{{{label}}}": 1.0}
    return right | {rf"\boxed{{{_UNLIKELY}}}": 0.0} if len(_GROWS.findall(label)) > 1 else right


def form(label: str) -> str:
    """Return a key that labels share whose trials have the same outcome: the label with digits 2 to
    9 as 1. Whether a boxed label is scored as right depends on whether it can be read. Zeros stay,
    since division by them fails, and so do powers of powers, since their size decides whether they
    can be computed."""
    return label if len(_GROWS.findall(label)) > 1 else label.translate(_DIGITS)


def _answer_in(response: str) -> str:
    """Return the part of a response that holds its answer."""
    box = last_box(response)
    return box if box is not None else introduced(response) or response.strip().rpartition("\n")[2]


def _read_response(response: str) -> list[Any]:
    """Return math-verify's parse of a response: an expression and its text, or one, or neither."""
    box = last_box(response)
    if box is not None:
        return _read(box)
    said = introduced(response) or response.strip().rpartition("\n")[2]
    if _MORE_THAN_A_NUMBER.search(said) and not words(said):
        found = _read(said)
        if found and not isinstance(found[0], str):
            return found
    return _parse(delimited(response))


def _read(text: str) -> list[Any]:
    """Return math-verify's parse of a label, or of a box's content."""
    text = introduced(text) or text
    is_formula_in_words = words(text) and _DELIMITED.search(text)
    found = _parse(delimited(text)) if _is_prose(text) or is_formula_in_words else []
    latex = as_latex(text)
    if found or not _IS_THERE.search(latex):
        return found
    return _parse(rf"\boxed{{{latex}}}", (LatexExtractionConfig(),))


def _is_prose(text: str) -> bool:
    return len(words(text)) >= _FEWEST_WORDS_OF_PROSE


@lru_cache(maxsize=4)
def _parse(text: str, targets: tuple[Any, ...] = _ALL_TARGETS) -> list[Any]:
    _be_quiet()
    expressions: list[Any] = parse(text, targets, parsing_timeout=None)
    return expressions


def _is_equal_by_mistake(gold: Any, found: Any) -> bool:
    """Return whether math-verify calls two expressions equal that are not."""
    if gold == found:
        return False
    if isinstance(gold, Expr) and isinstance(found, Expr) and gold.is_number and found.is_number:
        if gold.has(UnevaluatedExpr) or found.has(UnevaluatedExpr):  # percent: 50 % is 50 and 0.5
            return False
        one, other = N(gold), N(found)
        apart, size = abs(one - other), (abs(one) + abs(other)) / 2
        are_known = apart.is_Float and size.is_Float  # and not infinite, nor a sum without a value
        return bool(are_known and apart > _NEARLY * size)
    if isinstance(gold, Eq) and isinstance(found, Eq) and not solve(gold, gold.free_symbols):
        ratio = simplify((gold.lhs - gold.rhs) / (found.lhs - found.rhs))  # neither has a solution
        return not ratio.is_number or ratio.is_zero is True
    return False


@cache
def _be_quiet() -> None:
    """Silence math-verify, which logs at every call that its own time limit is off. That limit
    needs signals; the scorer's worker process has a time limit that works."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


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
    without braces gives everything up to white space or a dollar sign."""
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
    """Return the rest of the line after the last "answer is", "answer:" or "####", if any."""
    introductions = list(_INTRODUCTION.finditer(text))
    rest = text[introductions[-1].end() :].strip() if introductions else ""
    return rest.splitlines()[0] if rest else ""


def words(text: str) -> list[str]:
    """Return the words of text other than LaTeX, function names, "and" and "or"."""
    return [word[1] for word in _WORDS.finditer(_DELIMITED.sub("", text)) if word[1]]


def delimited(text: str) -> str:
    """Return text with dollar signs around its formulas, if it has LaTeX and none of it is delimited."""
    if "\\" not in text or _DELIMITED.search(text):
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
