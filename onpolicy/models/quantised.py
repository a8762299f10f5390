"""Writes a checkpoint with rounded weights as numbers and scales, in the form of compressed-tensors.

onpolicy reads it, and transformers where compressed-tensors is installed, as it is beside SGLang, but
for mixtures, of whose experts transformers reads no quantised ones. Loaded there in float32
and cast to the dtype that they were rounded from, its weights are those that a run with the same format
computes with; loaded in bfloat16, compressed-tensors rounds the scales first, and gets other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from onpolicy.errors import ConfigError
from onpolicy.models.compressed import KEY, parts_of, told
from onpolicy.models.export import export_checkpoint
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import CheckpointReader, stored_shapes
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.rounding import FORMATS, is_rounded


def export_quantised(
    source: Path, directory: Path, weight_format: str, rounds_inputs: bool = False
) -> int:
    """Write the checkpoint of `source` in a format; returns how many of its tensors are rounded.

    `rounds_inputs`: whoever loads it also rounds what linears read, with a scale for each token.
    Raises ConfigError for a checkpoint that nobody could read so.
    """
    config = load_config(str(source), False)
    shapes = stored_shapes(source, "--hf-checkpoint")
    taken = [name for name, shape in shapes.items() if is_rounded(name, shape)]
    if together := next((name for name, shape in shapes.items() if shape.dim() > 2), None):
        raise ConfigError(
            f"--hf-checkpoint={source}: {together} has {shapes[together].dim()} dimensions, and numbers "
            "and scales are those of one matrix. Export checkpoints that hold experts one by one."
        )
    block = FORMATS[weight_format].block
    if unread := next((name for name in taken if not _is_read(shapes[name].shape, block)), None):
        raise ConfigError(
            f"--quantised={weight_format}: {unread} has {shapes[unread].shape[0]} output and "
            f"{shapes[unread].shape[1]} input channels, which compressed-tensors does not cut into such "
            "blocks. Choose a format with a scale for each output channel."
        )
    dtype = str(config.dtype or torch.float32).removeprefix("torch.")
    export_checkpoint(_buckets(source, weight_format), directory, source, dtype)
    kept = {name.removesuffix(".weight") for name, x in shapes.items() if x.dim() == 2} | {
        "lm_head"
    }
    kept -= {name.removesuffix(".weight") for name in taken}
    file = directory / "config.json"
    written = json.loads(file.read_text()) | {KEY: told(weight_format, kept, rounds_inputs)}
    file.write_text(json.dumps(written, indent=2))
    return len(taken)


def holds_experts(directory: Path) -> bool:
    """Whether a checkpoint is a mixture's, with its experts one by one."""
    return any(".experts." in name for name in stored_shapes(directory, "--hf-checkpoint"))


def _is_read(shape: torch.Size, block: tuple[int, int]) -> bool:
    """compressed-tensors asks for whole blocks, and takes one column of them for scales of channels."""
    (outputs, inputs), (rows, columns) = shape, block
    if columns and inputs % columns:
        return False
    return rows == 1 or outputs <= rows or (outputs % rows == 0 and inputs > columns)


def _buckets(source: Path, weight_format: str) -> Iterator[WeightBucket]:
    for bucket in CheckpointReader(source).buckets():
        yield [part for name, tensor in bucket for part in parts_of(name, tensor, weight_format)]
