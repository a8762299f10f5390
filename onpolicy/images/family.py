"""The published models that see images, and how each stands an image among tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onpolicy.errors import ConfigError
from onpolicy.system.files import read_json_object


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """The rules of one family of models."""

    model_type: str
    """model_type of the whole model. Example: 'qwen3_vl'"""

    image_token: int
    """Token that stands for one row of an image's features."""

    marker_token: int
    """Token that a chat template writes once for an image."""

    end_token: int | None
    """Token that follows an image's tokens; None: the template writes what follows."""

    frame_tokens: tuple[int, ...]
    """Tokens before and after the marker where a template writes them; empty: none."""

    merge_size: int
    """Side of a square of patches that gives one row; 1 where `rows_of_each` counts them."""

    rows_of_each: int | None
    """Number of rows of every image; None: it depends on the image's size."""

    axis_sections: tuple[int, ...] | None
    """Pairs of angles that follow time, height and width (M-RoPE); None: a token has one position."""

    @property
    def sees_both_ways(self) -> bool:
        """Return whether a token of an image sees the image's later tokens, too."""
        return self.model_type in BOTH_WAYS

    @staticmethod
    def of(directory: str | Path, flag: str = "--hf-checkpoint") -> ImageFamily:
        """Return the family of a checkpoint. Raise ConfigError for a model without aligned images."""
        name = f"{flag}={directory}"
        raw = read_json_object(Path(directory) / "config.json", f"{name}: config.json")
        make = _FAMILIES.get(str(raw.get("model_type")))
        if make is None:
            raise ConfigError(
                f"{name}: --images: model_type={raw.get('model_type')}, and images have aligned "
                f"operators in {', '.join(sorted(_FAMILIES))}. Leave it out to train on text alone."
            )
        try:
            return make(raw)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{name}: config.json says no {error}, so the tokens of an image are not known. "
                "Download the checkpoint again."
            ) from error


def _qwen3_vl(raw: Mapping[str, Any]) -> ImageFamily:
    """Return the family's rules. Source: transformers/models/qwen3_vl/processing_qwen3_vl.py."""
    text = raw["text_config"]
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return ImageFamily(
        model_type="qwen3_vl",
        image_token=raw["image_token_id"],
        marker_token=raw["image_token_id"],
        end_token=None,
        frame_tokens=(raw["vision_start_token_id"], raw["vision_end_token_id"]),
        merge_size=raw["vision_config"].get("spatial_merge_size", 2),
        rows_of_each=None,
        axis_sections=tuple(rope.get("mrope_section", (24, 20, 20))),
    )


def _gemma3(raw: Mapping[str, Any]) -> ImageFamily:
    """Return the family's rules. Source: transformers/models/gemma3/processing_gemma3.py."""
    return ImageFamily(
        model_type="gemma3",
        image_token=raw.get("image_token_index", raw.get("image_token_id", 262144)),
        marker_token=raw.get("boi_token_index", 255999),
        end_token=raw.get("eoi_token_index", 256000),
        frame_tokens=(),
        merge_size=1,
        rows_of_each=raw.get("mm_tokens_per_image", 256),
        axis_sections=None,
    )


BOTH_WAYS = ("gemma3",)
"""Families of `sees_both_ways`, whose engines may not cut a prompt within an image."""

_FAMILIES = {"gemma3": _gemma3, "qwen3_vl": _qwen3_vl}
