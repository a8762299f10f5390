"""Placed images as they travel with a request to an engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from onpolicy.system.records import Shape
from onpolicy.trajectory import PlacedImage

_SHAPE = Shape(PlacedImage)


def values_of(image: PlacedImage) -> Any:
    """Return an image and its place as JSON values."""
    return _SHAPE.values(image)


def image_of(values: Any) -> PlacedImage:
    """Return the image that `values_of` wrote. Raise ValueError for other values."""
    return _SHAPE.take(values)


def digest_of(images: Sequence[PlacedImage]) -> str:
    """Return a digest of images and their places."""
    said = repr([(image.start, image.digest) for image in images])
    return hashlib.sha256(said.encode()).hexdigest()
