"""A decoder that sees: the inputs of one pass, in which the rows of images replace embeddings.

Both engines prepare a pass here: the trainer one of whole sequences, the rollout engine one of the
tokens that it prefills or decodes. What a pass needs beside its embeddings (positions of three axes,
rows that layers add, images whose tokens see each other) stays until the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onpolicy.errors import ContractError
from onpolicy.images.pixels import PixelReader, Pixels
from onpolicy.images.placed import PlacedImage
from onpolicy.models.vision.image_attention import BlockAttention, ImageBlock, KeyRows
from onpolicy.models.vision.image_positions import axis_positions, rotate_by_axes
from onpolicy.models.vision.tower import ImageRows, make_tower
from onpolicy.ops.base import Operators

NAME = "tower"
"""The name of the tower among the decoder's children."""


class SequencePart(NamedTuple):
    """Tokens of a sequence that one pass computes."""

    first: int
    """Index of the first of them in the sequence."""

    length: int
    images: Sequence[PlacedImage]
    """All images of the sequence."""


class _Pass(NamedTuple):
    """A pass, beside its embeddings."""

    positions: Tensor
    """int64 [3, T]"""

    rows: Tensor
    """int64 [R]: the rows of the pass that stand for images."""

    added: Sequence[Tensor]
    """[R, H] for each of the first layers."""

    blocks: Sequence[ImageBlock]
    """Images whose tokens see each other."""


class Sight:
    """The images of a decoder, and its tower, which is the decoder's child of that name."""

    def __init__(self, decoder: Any, directory: str | Path):
        self.pixels = PixelReader(directory)
        self._decoder = decoder
        self._pass: _Pass | None = None
        self._merge = self.pixels.family.merge_size
        sections = self.pixels.family.axis_sections
        if sections is not None:
            rotate_by_axes(decoder.rotary_emb, sections, lambda: self._now.positions)
        for number, layer in enumerate(decoder.layers):
            layer.register_forward_hook(partial(self._add, number))

    @property
    def _now(self) -> _Pass:
        if self._pass is None:
            raise ContractError("the decoder ran before its images were given. Report it.")
        return self._pass

    def attention(self, key_rows: KeyRows) -> BlockAttention | None:
        """Return the attention of the pass's images whose tokens see each other; None without any."""
        blocks = self._now.blocks
        return BlockAttention(blocks, key_rows) if blocks else None

    def embed(self, tokens: Tensor, parts: Sequence[SequencePart]) -> Tensor:
        """Return the decoder's inputs_embeds, [1, T, H], for the tokens of `parts` end to end, [T].

        Raise ValueError for pixels that differ from those that the tokens were made with.
        """
        embedded: Tensor = self._decoder.get_input_embeddings()(tokens[None])[0]
        positions, rows, found, blocks, row = [], [], [], [], 0
        known: dict[str, ImageRows] = {}  # samples of a group have the same images
        for number, part in enumerate(parts):
            pixels = [self.pixels.checked(image) for image in part.images]
            positions.append(self._positions(part, pixels))
            for image, each in zip(part.images, pixels, strict=True):
                low, high = max(image.start, part.first), min(image.end, part.first + part.length)
                if low < high:
                    at = row + low - part.first
                    rows.append(torch.arange(at, at + high - low))
                    seen = slice(low - image.start, high - image.start)
                    if each.digest not in known:
                        known[each.digest] = self._decoder.tower(each)
                    found.append((known[each.digest], seen))
                    if self.pixels.family.sees_both_ways:
                        blocks.append(_whole_block(number, at, image, high - low))
            row += part.length
        where = torch.cat(rows or [torch.empty(0, dtype=torch.int64)]).to(tokens.device)
        self._pass = _Pass(torch.cat(positions, 1).to(tokens.device), where, _added(found), blocks)
        if found:
            new = torch.cat([image.embeddings[seen] for image, seen in found])
            embedded = embedded.index_copy(0, where, new.to(embedded.dtype))
        return embedded[None]

    def _positions(self, part: SequencePart, pixels: Sequence[Pixels]) -> Tensor:
        side, grids = self._merge, []
        for image, each in zip(part.images, pixels, strict=True):
            if each.grid is not None:
                time, height, width = each.grid
                grids.append((image.start, (time, height // side, width // side)))
        return axis_positions(part.first, part.length, grids)

    def _add(self, number: int, layer: nn.Module, args: Any, out: Any) -> Any:
        """Add the images' rows for this layer to its output: [1, T, H], or a tuple that begins so."""
        now = self._now
        if number >= len(now.added):
            return out
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        hidden = hidden.index_add(1, now.rows, now.added[number].to(hidden.dtype)[None])
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden


def _whole_block(part: int, row: int, image: PlacedImage, count: int) -> ImageBlock:
    """Return the block of an image. Raise ContractError if a pass has a part of it alone."""
    if count != image.end - image.start:
        raise ContractError(
            f"image at token {image.start}: a pass has {count} of its {image.end - image.start} tokens, "
            "which see each other. Start the engine without chunked prefill (--chunked-prefill-size -1)."
        )
    return ImageBlock(part, row, image.start, image.end)


def _added(found: Sequence[tuple[ImageRows, slice]]) -> list[Tensor]:
    """Return what each of the first layers adds, of all images."""
    layers = zip(*([x[seen] for x in image.added] for image, seen in found), strict=True)
    return [torch.cat(each) for each in layers]


def add_sight(causal_lm: PreTrainedModel, directory: str | Path, operators: Operators) -> None:
    """Give a causal LM's decoder the tower of its checkpoint, with parameters on the meta device."""
    decoder: Any = causal_lm.base_model
    decoder.add_module(NAME, make_tower(directory, operators))
    decoder.sight = Sight(decoder, directory)


def sight_of(decoder: nn.Module) -> Sight | None:
    """Return the images of a decoder; None if it reads text alone."""
    return getattr(decoder, "sight", None)
