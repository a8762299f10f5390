"""Images among the tokens of a sequence, and as they travel with a request to an engine."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from onpolicy.system.records import Count, Shape, written_as


def _write(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _read(written: str, _: Any) -> bytes:
    return base64.b64decode(written, validate=True)


@dataclass(slots=True, frozen=True)
class PlacedImage:
    """An image among the tokens of a sequence."""

    start: Count
    """Index of the first token that stands for it."""

    end: Count
    """Index after the last one."""

    data: Annotated[bytes, written_as(str, _write, _read)] = field(repr=False)
    """The encoded image, as it was given."""

    digest: str
    """SHA-256 of its pixels (`images/pixels.py`), by which processes compare them."""


_SHAPE = Shape(PlacedImage)


def write_images(images: Sequence[PlacedImage]) -> str:
    """Return images and their places as JSON."""
    return json.dumps([_SHAPE.values(image) for image in images])


def read_images(text: str) -> tuple[PlacedImage, ...]:
    """Return the images that `write_images` wrote. Raise ValueError for other text."""
    return tuple(map(_SHAPE.take, json.loads(text)))


def digest_of(images: Sequence[PlacedImage]) -> str:
    """Return a digest of images and their places."""
    said = repr([(image.start, image.digest) for image in images])
    return hashlib.sha256(said.encode()).hexdigest()
