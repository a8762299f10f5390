"""The text and the tokens of images in a prompt.

A template writes one marker for an image, and the model reads as many tokens as the image has rows.
As the publishers' processors do, the marker's text is replaced before the text is tokenised.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onpolicy.images.placed import PlacedImage
from onpolicy.images.reading import read_image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from onpolicy.images.pixels import PixelReader


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that was read and measured, as the `image` of a message's part."""

    data: bytes
    num_rows: int
    digest: str

    @property
    def url(self) -> str:
        """Return the encoded image as a data URL."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as opened:
            kind = opened.get_format_mimetype()
        return f"data:{kind};base64,{base64.b64encode(self.data).decode()}"


class ImagePlacer:
    """The places of images in texts and tokens, by one checkpoint's processor and tokenizer."""

    def __init__(self, pixels: PixelReader, tokenizer: PreTrainedTokenizerBase):
        family = pixels.family
        self._pixels, self._image_token = pixels, family.image_token
        named = [family.marker_token, family.image_token, family.end_token]
        self.marker, image, self._end = (
            "" if token is None else str(tokenizer.convert_ids_to_tokens(token)) for token in named
        )
        self._image = image
        frame = [str(tokenizer.convert_ids_to_tokens(token)) for token in family.frame_tokens]
        self.stand_in = self.marker.join(frame or ("", ""))
        """Text for an image in a prompt that no template writes."""

    @staticmethod
    def of(directory: str | Path | None, tokenizer: PreTrainedTokenizerBase) -> ImagePlacer | None:
        """Return the placer of a checkpoint, None for None. Raise ConfigError for one whose images are
        not aligned."""
        if directory is None:
            return None
        from onpolicy.images.pixels import PixelReader  # brings torch along

        return ImagePlacer(PixelReader(directory), tokenizer)

    def measured(self, data: bytes) -> SeenImage:
        """Return an image with its number of tokens. Raise ValueError for one that cannot be read."""
        found = self._pixels(data)
        return SeenImage(data, found.num_rows, found.digest)

    def see(self, said: Any, folder: Path | None = None) -> SeenImage:
        """Return the image that `read_image` reads, measured. Raise ValueError as it does."""
        return self.measured(read_image(said, folder))

    def expanded(self, text: str, images: Sequence[SeenImage]) -> str:
        """Return a text in which the marker of each image, in order, is the text of its tokens.

        Raise ValueError where there are more or fewer markers than images.
        """
        parts = text.split(self.marker)
        if len(parts) != len(images) + 1:
            raise ValueError(
                f"{len(parts) - 1} times {self.marker!r} in the prompt, and {len(images)} images: each "
                "image has one place. Correct the prompt or its images"
            )
        texts = [self._text_of(image) for image in images]
        return parts[0] + "".join(a + b for a, b in zip(texts, parts[1:], strict=True))

    def shown(self, expanded: str) -> str:
        """Return an expanded text for readers, with one token for each image."""
        return re.sub(f"(?:{re.escape(self._image)})+", lambda _: self._image, expanded)

    def _text_of(self, image: SeenImage) -> str:
        rows = self._image * image.num_rows
        return f"\n\n{self.marker}{rows}{self._end}\n\n" if self._end else rows

    def placed(
        self, token_ids: Sequence[int], images: Sequence[SeenImage], start: int = 0
    ) -> tuple[PlacedImage, ...]:
        """Return the places of images among tokens that begin at position `start` of a sequence.

        Raise ValueError unless each image has as many tokens, one after another, as it has rows.
        """
        at = [i for i, token in enumerate(token_ids, start) if token == self._image_token]
        found, first = [], 0
        for image in images:
            places = at[first : first + image.num_rows]
            if not places or places != [*range(places[0], places[0] + image.num_rows)]:
                raise ValueError(self._of_text(len(at), images))
            found.append(PlacedImage(places[0], places[-1] + 1, image.data, image.digest))
            first += image.num_rows
        if first != len(at):
            raise ValueError(self._of_text(len(at), images))
        return tuple(found)

    def _of_text(self, count: int, images: Sequence[SeenImage]) -> str:
        rows = sum(image.num_rows for image in images)
        return (
            f"{count} tokens {self._image!r}, and the {len(images)} images have {rows}, each its own in "
            "one place. Take them out of the text"
        )
