"""What one rank's Megatron parameter holds of one Hugging Face tensor."""

from __future__ import annotations

from dataclasses import dataclass

Block = tuple[int | slice, ...]
"""Indexes a tensor: one entry per leading axis, whole axes left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a Hugging Face tensor, and the block of a parameter that holds it."""

    name: str
    """Hugging Face's. Example: 'model.layers.0.self_attn.q_proj.weight'"""

    source: Block
    target: Block


def is_expert(parameter: str) -> bool:
    """Whether a parameter, by its name, is shared by expert parallelism."""
    return ".mlp.experts." in parameter
