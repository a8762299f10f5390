"""Pixels as a model's own processor makes them from an encoded image.

Both engines and the run call this function, each in a process of its own, and compare digests.
transformers' processors for PIL are used: they resize in whole numbers, which are the same on every
CPU, and PyTorch's resize is not.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.images.family import ImageFamily
from onpolicy.images.placed import PlacedImage

MOST_PIXELS = 1 << 26
"""The most pixels of an encoded image; a small file can claim many more."""

MOST_KEPT = 1 << 26
"""The most numbers of pixels that a reader keeps for the next call with the same image."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """The input of a vision tower, for one image."""

    values: Tensor
    """float32: patches [P, channels x patch], or a picture [1, channels, height, width]."""

    grid: tuple[int, int, int] | None
    """Patches in time, height and width, where their number depends on the image."""

    num_rows: int
    """Number of tokens that stand for the image."""

    digest: str
    """SHA-256 of the values and the grid."""


class PixelReader:
    """A checkpoint's image processor; it keeps the pixels of the last images, by their encoded bytes."""

    def __init__(self, directory: str | Path, flag: str = "--hf-checkpoint"):
        self.directory, self.family = Path(directory), ImageFamily.of(directory, flag)
        self._processor, self._kept = _processor(directory, flag), OrderedDict[bytes, Pixels]()

    def __call__(self, data: bytes) -> Pixels:
        """Return the pixels of an encoded image. Raise ValueError for one that cannot be read."""
        if data in self._kept:
            self._kept.move_to_end(data)
            return self._kept[data]
        self._kept[data] = found = self._read(data)
        held = sum(pixels.values.numel() for pixels in self._kept.values())
        while held > MOST_KEPT and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].values.numel()
        return found

    def checked(self, image: PlacedImage) -> Pixels:
        """Return the pixels of a placed image. Raise ValueError unless they are those that it was placed
        by, in the process that made the prompt."""
        pixels, count = self(image.data), image.end - image.start
        if (pixels.digest, pixels.num_rows) != (image.digest, count):
            raise ValueError(
                f"image at token {image.start}: its pixels are {pixels.digest[:16]} for "
                f"{pixels.num_rows} tokens here, and were {image.digest[:16]} for {count} where the "
                "prompt was made. Both need the same checkpoint, transformers and Pillow."
            )
        return pixels

    def _read(self, data: bytes) -> Pixels:
        found = self._processor(images=[decoded(data)], return_tensors="pt")
        values = found["pixel_values"].float().contiguous()
        grid, family = None, self.family
        if (counts := found.get("image_grid_thw")) is not None:
            grid = tuple(counts[0].tolist())
        num_rows = family.rows_of_each
        if num_rows is None:
            assert grid is not None
            num_rows = prod(grid) // family.merge_size**2
        digest = hashlib.sha256(repr((grid, tuple(values.shape))).encode())
        digest.update(values.numpy().tobytes())
        return Pixels(values, grid, num_rows, digest.hexdigest())


def decoded(data: bytes) -> Any:
    """Return a PIL image of three colours. Raise ValueError for what is no image, or too large."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise ValueError(
                    f"{opened.width} x {opened.height} pixels, and an image may have {MOST_PIXELS}"
                )
            if (frames := getattr(opened, "n_frames", 1)) > 1 or opened.mode[0] in "IF":
                raise ValueError(
                    f"frames={frames}, mode={opened.mode}: an image has one frame, of 8 bits for a "
                    "colour. Convert it before"
                )
            # A camera's orientation is applied; what is transparent becomes white, not black.
            upright = ImageOps.exif_transpose(opened)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright)
            return upright.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no image can be read from these {len(data)} bytes ({error})") from error


def _processor(directory: str | Path, flag: str) -> Any:
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(
            f"{flag}={directory}: --images: no image processor ({in_one_line(error)}). Put the "
            "checkpoint's preprocessor_config.json there."
        ) from error
    if getattr(found, "do_pan_and_scan", None):
        raise ConfigError(
            f"{flag}={directory}: do_pan_and_scan=true in preprocessor_config.json makes several "
            "pictures of one, and an image has one place here. Set it to false."
        )
    return found
