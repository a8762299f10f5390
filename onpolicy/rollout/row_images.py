"""Images of a prompt file's rows: in fields of their own, and in parts of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onpolicy.chat.messages import Message
from onpolicy.images.placing import ImagePlacer, SeenImage

FIELDS = ("images", "image")
"""Fields with a row's images: a list of them, or one."""

PLACE = "<image>"
"""A text that stands for the next image of a row which has some, as LLaMA-Factory and verl read it."""


@dataclass(slots=True)
class RowImages:
    """A reader of a row's images, called for each place of the prompt in order."""

    left: list[Any]
    """The images of the row's fields that no place took so far."""

    placer: ImagePlacer
    folder: Path | None
    place: str = ""
    """`PLACE` if the row has images; empty: that text is ordinary."""

    @staticmethod
    def of(row: dict[str, Any], placer: ImagePlacer, folder: Path | None) -> RowImages:
        """Return the reader of a row. Raises ValueError for one with images in both fields."""
        given = [row[field] for field in FIELDS if row.get(field)]
        if len(given) > 1:
            raise ValueError("has images and image, and one of them is read: drop the other")
        left = [each for value in given for each in (value if isinstance(value, list) else [value])]
        return RowImages(left, placer, folder, PLACE if left else "")

    def __call__(self, said: Any) -> SeenImage:
        """Return the image that a part says; of one that says none, the next of the row's. Raises
        ValueError where there is none, or for one that cannot be read."""
        if not said:
            if not self.left:
                raise ValueError(
                    "the prompt has a place for an image, and the row has no more images"
                )
            said = self.left.pop(0)
        return self.placer.see(said, self.folder)

    def expanded(self, text: str) -> tuple[str, list[SeenImage]]:
        """Return a plain prompt's text with those of its images' tokens, and the images."""
        text = text.replace(self.place, self.placer.stand_in) if self.place else text
        images = [self({}) for _ in range(text.count(self.placer.marker))]
        return self.placer.expanded(text, images), images

    def end(self) -> None:
        """Raise ValueError for an image without a place in the prompt."""
        if self.left:
            raise ValueError(
                f"the prompt has no place for the row's last {len(self.left)} images: write {PLACE} "
                "where each of them is to stand"
            )


def folder_of(path: Path) -> Path:
    """Return the folder in which the relative paths of a data file begin."""
    return path if path.is_dir() else path.parent


def sendable(messages: Sequence[Message] | None) -> list[dict[str, Any]] | None:
    """Return messages as clients send them to a gateway: their images are data URLs."""
    if messages is None:
        return None
    return [
        {**message, "content": [_part(each) for each in content]}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    return {"type": "image_url", "image_url": {"url": part["image"].url}}
