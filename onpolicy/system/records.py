"""The validation of records that a run wrote and reads back; one of another shape is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

Shape = TypeVar("Shape")

CLOSED = ConfigDict(extra="forbid")
"""The configuration of a TypedDict (`with_config`) that refuses unknown fields."""

OPEN = ConfigDict(extra="allow")
"""The configuration of a TypedDict inside a closed one that allows fields for other readers."""

SHOWN = 60
"""The most characters of a value in a message."""


def checked(shape: TypeAdapter[Shape], value: Any) -> Shape:
    """Return `value`, read from JSON, if it has the shape, without coercion of types.

    Raises a ValueError that names the first field which is missing, unknown or of another type.
    """
    with _first_fault_named():
        return shape.validate_python(value, strict=True)


def checked_text(shape: TypeAdapter[Shape], text: bytes) -> Shape:
    """Return the value of JSON text if it has the shape; it may be a dataclass (not in `checked`)."""
    with _first_fault_named():
        return shape.validate_json(text, strict=True)


@contextmanager
def _first_fault_named() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the record"
        if first["type"] == "missing":
            raise ValueError(f"holds no {place}") from error
        shown = repr(first["input"])
        shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
        rule = first["msg"].removeprefix("Input s").removeprefix("Value error, ")
        raise ValueError(f"{place}={shown}: {'s' if rule != first['msg'] else ''}{rule}") from error
