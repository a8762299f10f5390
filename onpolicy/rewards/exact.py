"""The response, without surrounding white space, must be the label."""


def score(response: str, label: str) -> float:
    """1.0 if they are equal, else 0.0."""
    return float(response.strip() == label.strip())


def answer(response: str) -> str:
    """What is compared."""
    return response.strip()


def check_label(label: str) -> None:
    """Any label but an empty one can be matched."""
    if not label.strip():
        raise ValueError("it is empty")
