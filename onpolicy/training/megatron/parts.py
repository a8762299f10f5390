"""Correspondence of one rank's Megatron parameter with blocks of Hugging Face tensors."""

from __future__ import annotations

from dataclasses import dataclass

Block = tuple[int | slice, ...]
"""An index of a tensor: one entry per leading axis, whole axes left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a Hugging Face tensor, and the block of a parameter that holds it."""

    name: str
    """Hugging Face name of the tensor. Example: 'model.layers.0.self_attn.q_proj.weight'"""

    source: Block
    target: Block


def is_expert(parameter: str) -> bool:
    """Return whether a parameter, by its name, is sharded by expert parallelism."""
    return ".mlp.experts." in parameter
