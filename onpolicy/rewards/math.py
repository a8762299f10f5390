r"""The response's last mathematical answer must equal the label (math-verify).

Understands LaTeX and plain expressions; prefers \boxed{}.
"""

from math_verify import parse, verify


def score(response: str, label: str) -> float:
    """1.0 if the answer is mathematically equal to the label, else 0.0."""
    # The time limit is kept by our worker process; math-verify's own uses signals.
    return float(
        verify(_parse_label(label), parse(response, parsing_timeout=None), timeout_seconds=None)
    )


def check_label(label: str) -> None:
    """Raise ValueError if math-verify finds no expression in the label."""
    if not _parse_label(label):
        raise ValueError("math-verify finds no mathematical expression in it")


def _parse_label(label: str) -> list:
    return parse(label, parsing_timeout=None) or parse(f"${label}$", parsing_timeout=None)
