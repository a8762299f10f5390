"""Records that a run wrote and reads back: nothing is taken from one whose shape is another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

Shape = TypeVar("Shape")

CLOSED = ConfigDict(extra="forbid")
"""The shape of a TypedDict (`with_config`) in which a field that nobody reads is another shape too."""

OPEN = ConfigDict(extra="allow")
"""The shape of a TypedDict inside a closed one, whose rule it would have otherwise: others read more of
it."""

SHOWN = 60
"""Characters of a value in a message."""


def checked(shape: TypeAdapter[Shape], value: Any) -> Shape:
    """Return `value`, as JSON was read, if it has the shape: no text for a number, no whole one for a
    truth.

    Raises ValueError that names the first field which is missing, too many or of another type.
    """
    with _first_fault_named():
        return shape.validate_python(value, strict=True)


def checked_text(shape: TypeAdapter[Shape], text: bytes) -> Shape:
    """Return what JSON says, if it has the shape; as `checked`, whose shapes are no dataclasses."""
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
