"""Images as data sets and clients give them: files, data URLs, base64, and bytes in tables."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

MOST_BYTES = 64 << 20
"""The most bytes of an encoded image."""


def read_image(value: Any, folder: Path | None = None) -> bytes:
    """Return the bytes of an encoded image.

    value: bytes; `{"bytes": ..., "path": ...}` as tables of the hub have them; a data URL; a path,
    relative to `folder`, or a file URL; or one of these under `image`, `url` or `image_url`. Without a
    folder paths are refused, since a client could name any file of the host.

    Raise ValueError for anything else, such as an address in a network.
    """
    if isinstance(value, Mapping):
        for key in ("bytes", "image", "image_url", "url", "path"):
            if value.get(key) is not None:
                return read_image(value[key], folder)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _checked(bytes(value))
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.80}: an image must be a file, a data URL or bytes")
    if value.startswith("data:"):
        return _checked(_of_data_url(value))
    if value.startswith(("http://", "https://", "s3://", "gs://")):
        raise ValueError(
            f"{value:.80}: images are not fetched from a network. Store it, and give its file"
        )
    if folder is None:
        raise ValueError(f"{value!r:.80}: only data URLs are read here, no files of the host")
    path = folder / value.removeprefix("file://")
    try:
        return _checked(path.read_bytes())
    except OSError as error:
        raise ValueError(f"image={path}: cannot be read ({error.strerror})") from error


def _of_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise ValueError(f"{url!r:.60}: a data URL has a comma before its data")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"{url!r:.60}: is no base64 ({error})") from error


def _checked(data: bytes) -> bytes:
    if not 0 < len(data) <= MOST_BYTES:
        raise ValueError(f"an image of {len(data)} bytes: it must have 1 to {MOST_BYTES}")
    return data
