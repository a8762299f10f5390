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
from onpolicy.weights.rounding import FORMATS, is_rounded, quantise

BITS = {"int3": 3, "int3_group128": 3, "int4": 4, "int4_group128": 4, "int8": 8}
FLOATS = {"fp8_e4m3"}


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
    columns = FORMATS[weight_format].block[1] or 1
    if uneven := next((name for name in taken if shapes[name].shape[1] % columns), None):
        raise ConfigError(
            f"--quantised={weight_format}: {uneven} has {shapes[uneven].shape[1]} input channels, and "
            f"compressed-tensors has groups of {columns} alone. Choose a format without groups."
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
    scales = (f"{name}_scale", scale.contiguous())
    if weight_format in FLOATS:
        return [(name, numbers.to(torch.float8_e4m3fn)), scales]
    packed = (f"{name}_packed", _packed(numbers, BITS[weight_format]))
    return [packed, (f"{name}_shape", torch.tensor(weight.shape)), scales]


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
    is_float, columns = weight_format in FLOATS, FORMATS[weight_format].block[1]
    numbers = {
        "num_bits": 8 if is_float else BITS[weight_format],
        "type": "float" if is_float else "int",
        "symmetric": True,
    }
    blocks = {"strategy": "group", "group_size": columns} if columns else {"strategy": "channel"}
    group = {"targets": ["Linear"], "weights": numbers | {"dynamic": False} | blocks}
    if rounds_inputs:
        group["input_activations"] = numbers | {"dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": sorted(kept),
        "config_groups": {"group_0": group},
    }
