"""Rule `exact`: the response, without surrounding white space, must be the label."""


def score(response: str, label: str) -> float:
    """Return 1.0 if they are equal, else 0.0."""
    return float(response.strip() == label.strip())


def answer(response: str) -> str:
    """Return the text that is compared."""
    return response.strip()


def check_label(label: str) -> None:
    """Raise ValueError for an empty label."""
    if not label.strip():
        raise ValueError("it is empty")
