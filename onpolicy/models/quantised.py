"""Writes a checkpoint with rounded weights as numbers and scales, in the form of compressed-tensors.

transformers reads it where compressed-tensors is installed, as it is beside SGLang. Loaded in float32
and cast to the dtype that they were rounded from, its weights are those that a run with the same format
computes with; loaded in bfloat16, compressed-tensors rounds the scales first, and gets other numbers.
Source: compressed_tensors/compressors (0.18.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from onpolicy.errors import ConfigError
from onpolicy.models.export import export_checkpoint
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import stored_shapes, weight_files
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.packing import encode
from onpolicy.weights.rounding import FORMATS, FP8, is_rounded, outer_scale, quantise

BITS = {"int3": 3, "int3_group128": 3, "int4": 4, "int4_group128": 4, "int8": 8}
FLOATS = {
    "fp8_e4m3": "float",
    "fp8_e4m3_block128": "float",
    "mxfp4": "mxfp4-pack",
    "nvfp4": "nvfp4-pack",
}
"""Formats of floating-point numbers, and what compressed-tensors calls theirs."""


def export_quantised(
    source: Path, directory: Path, weight_format: str, rounds_inputs: bool = False
) -> int:
    """Write the checkpoint of `source` in a format; returns how many of its tensors are rounded.

    `rounds_inputs`: whoever loads it also rounds what linears read, with a scale for each token.
    Raises ConfigError for a checkpoint that transformers could not read so.
    """
    config = load_config(str(source), False)
    shapes = stored_shapes(source, "--hf-checkpoint")
    taken = [name for name, shape in shapes.items() if is_rounded(name, shape)]
    if any(".experts." in name or shape.dim() > 2 for name, shape in shapes.items()):
        raise ConfigError(
            f"--hf-checkpoint={source}: has experts, which transformers does not read from "
            "compressed-tensors. A run rounds them all the same; export checkpoints of dense models."
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
    told = json.loads(file.read_text()) | {
        "quantization_config": _told(weight_format, kept, rounds_inputs)
    }
    file.write_text(json.dumps(told, indent=2))
    return len(taken)


def _is_read(shape: torch.Size, block: tuple[int, int]) -> bool:
    """compressed-tensors asks for whole blocks, and takes one column of them for scales of channels."""
    (outputs, inputs), (rows, columns) = shape, block
    if columns and inputs % columns:
        return False
    return rows == 1 or outputs <= rows or (outputs % rows == 0 and inputs > columns)


def _buckets(source: Path, weight_format: str) -> Iterator[WeightBucket]:
    for file in weight_files(source, "--hf-checkpoint"):
        yield [
            stored
            for name, tensor in load_file(file).items()
            for stored in _stored(name, tensor, weight_format)
        ]


def _stored(name: str, weight: Tensor, weight_format: str) -> WeightBucket:
    if not is_rounded(name, weight):
        return [(name, weight)]
    numbers, scale = quantise(weight, weight_format)
    match weight_format:
        case "fp8_e4m3" | "fp8_e4m3_block128":
            found = {"": numbers.to(FP8), "_scale": scale}
        case "mxfp4":
            exponents = torch.frexp(scale).exponent + 126
            found = {"_packed": encode(numbers, weight_format), "_scale": exponents.to(torch.uint8)}
        case "nvfp4":
            outer = outer_scale(weight).view(1)
            found = {"_packed": encode(numbers, weight_format), "_scale": (scale * outer).to(FP8)}
            found["_global_scale"] = outer
        case _:
            packed = _packed(numbers, BITS[weight_format])
            found = {"_packed": packed, "_shape": torch.tensor(weight.shape), "_scale": scale}
    return [(f"{name}{what}", tensor.contiguous()) for what, tensor in found.items()]


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Integers, float32 [N, K] -> int32 [N, words]: their bits end to end, the lowest first, each
    integer with 2^(bits - 1) added."""
    unsigned = (numbers.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8).numpy()
    apart = np.unpackbits(unsigned[..., None], axis=-1, count=bits, bitorder="little")
    stream = apart.reshape(len(unsigned), -1)
    filled = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(filled, axis=-1, bitorder="little")
    return torch.from_numpy(words.view("<i4").copy())


def _told(weight_format: str, kept: set[str], rounds_inputs: bool) -> dict[str, Any]:
    """What config.json says of it."""
    rows, columns = FORMATS[weight_format].block
    numbers = {
        "num_bits": BITS.get(weight_format) or (4 if weight_format.endswith("fp4") else 8),
        "type": "float" if weight_format in FLOATS else "int",
        "symmetric": True,
    }
    blocks: dict[str, Any] = {"strategy": "channel"}
    if rows > 1:
        blocks = {"strategy": "block", "block_structure": [rows, columns]}
    elif columns:
        strategy = "tensor_group" if weight_format == "nvfp4" else "group"
        blocks = {"strategy": strategy, "group_size": columns}
    group = {"targets": ["Linear"], "weights": numbers | {"dynamic": False} | blocks}
    if rounds_inputs:
        group["input_activations"] = numbers | {"dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{FLOATS.get(weight_format, 'pack')}-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(kept),
        "config_groups": {"group_0": group},
    }
