"""Rounded weights as compressed-tensors stores them, and back: numbers and scales under names of their
own, and what config.json says of them.

Whoever reads a checkpoint here gets plain weights, each number times its scale, rounded once to the
dtype of config.json: the bits that were deployed. So both engines build models without quantisation.
Source: compressed_tensors/compressors (0.18.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.errors import ConfigError
from onpolicy.system.reading import read_json_object
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.packing import decode, encode
from onpolicy.weights.rounding import FORMATS, FP8, dequantise, is_rounded, outer_scale, quantise

BITS = {"int3": 3, "int3_group128": 3, "int4": 4, "int4_group128": 4, "int8": 8}
FLOATS = {
    "fp8_e4m3": "float",
    "fp8_e4m3_block128": "float",
    "mxfp4": "mxfp4-pack",
    "nvfp4": "nvfp4-pack",
}
"""Formats of floating-point numbers, and what compressed-tensors calls theirs."""

KEY = "quantization_config"
"""Where config.json says it."""

SHAPE = ".weight_shape"
PARTS = ("_packed", "_global_scale", "_scale", "_shape")
"""What a weight's name is followed by, beside nothing."""

UNREAD = ("observer", "scale_dtype", "zp_dtype")
"""What a configuration says of how a weight was rounded, or of a type that its tensors have anyway."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """How the weights of a checkpoint are stored."""

    weight_format: str
    dtype: torch.dtype

    @staticmethod
    def of(directory: Path, flag: str = "--hf-checkpoint") -> Compressed | None:
        """What a directory's config.json says; None of plain weights, and of a form that is not read."""
        if not (directory / "config.json").is_file():
            return None
        raw = read_json_object(directory / "config.json", f"{flag}={directory}: config.json")
        told = raw.get(KEY)
        if not isinstance(told, dict) or unread(told):
            return None
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
        return Compressed(_format_of(told), getattr(torch, dtype.removeprefix("torch.")))

    def shape(self, parts: Mapping[str, Tensor]) -> torch.Size:
        """The shape of the weight of these parts, which but for `_shape` may be on the meta device."""
        if "_shape" in parts:
            return torch.Size(parts["_shape"].tolist())
        if "_packed" in parts:
            rows, columns = parts["_packed"].shape
            return torch.Size((rows, 2 * columns))
        return parts[""].shape

    def weight(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """[N, K]: what its parts, by what follows its name, come to."""
        stored = STORED[self.weight_format]
        try:
            given = [parts[part] for part in stored.parts]
        except KeyError as error:
            raise ConfigError(
                f"{name}{error.args[0]}: is missing, and weights in {self.weight_format} have it. "
                "Export or download the checkpoint again."
            ) from error
        return dequantise(*stored.read(*given), self.weight_format, self.dtype)

    def plain(self, stored: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint, in any order -> plain ones, each as soon as its parts are there.

        Raises ConfigError if some are missing.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in stored:
            weight, part = weight_and_part(name)
            if not part and tensor.dtype != FP8:
                yield name, tensor
                continue
            waiting.setdefault(weight, {})[part] = tensor
            if waiting[weight].keys() == {*STORED[self.weight_format].parts}:
                yield weight, self.weight(weight, waiting.pop(weight))
        for weight, parts in waiting.items():
            yield weight, self.weight(weight, parts)


def weight_and_part(name: str) -> tuple[str, str]:
    """`linear.weight_scale` -> `linear.weight` and `_scale`; of another tensor, its name and nothing."""
    for part in PARTS:
        if name.endswith(f".weight{part}"):
            return name.removesuffix(part), part
    return name, ""


def by_weight(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of a checkpoint's tensors, by the plain tensor that each is a part of, and by part."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        weight, part = weight_and_part(name)
        found.setdefault(weight, {})[part] = name
    return found


def parts_of(name: str, weight: Tensor, weight_format: str) -> WeightBucket:
    """What is stored for a tensor: for one that no format is for, itself."""
    if not is_rounded(name, weight):
        return [(name, weight)]
    stored = STORED[weight_format]
    tensors = stored.write(weight, *quantise(weight, weight_format))
    return [
        (f"{name}{part}", tensor.contiguous())
        for part, tensor in zip(stored.parts, tensors, strict=True)
    ]


class Stored(NamedTuple):
    """How the weights of a format lie in a checkpoint."""

    parts: tuple[str, ...]
    """What follows the name of the weight, part by part."""

    write: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """(a weight, its numbers, their scales) -> its parts"""

    read: Callable[..., tuple[Tensor, Tensor]]
    """(its parts) -> numbers and scales"""


def _write_mxfp4(_: Tensor, numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    exponents = torch.frexp(scale).exponent + 126
    return encode(numbers, "mxfp4"), exponents.to(torch.uint8)


def _read_mxfp4(packed: Tensor, biased: Tensor) -> tuple[Tensor, Tensor]:
    exponents = biased.int() - 127
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return decode(packed, "mxfp4"), scale


def _write_nvfp4(weight: Tensor, numbers: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    outer = outer_scale(weight).view(1)
    return encode(numbers, "nvfp4"), (scale * outer).to(FP8), outer


def _integers_of(bits: int) -> Stored:
    def write(weight: Tensor, numbers: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return _packed(numbers, bits), torch.tensor(weight.shape), scale

    def read(packed: Tensor, shape: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return _integers(packed, torch.Size(shape.tolist()), bits), scale.float()

    return Stored(("_packed", "_shape", "_scale"), write, read)


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Integers, float32 [N, K] -> int32 [N, words]: their bits end to end, the lowest first, each
    integer with 2^(bits - 1) added."""
    unsigned = (numbers.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8).numpy()
    apart = np.unpackbits(unsigned[..., None], axis=-1, count=bits, bitorder="little")
    stream = apart.reshape(len(unsigned), -1)
    filled = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    words = np.packbits(filled, axis=-1, bitorder="little")
    return torch.from_numpy(words.view("<i4").copy())


def _integers(packed: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """What `_packed` made -> float32 of `shape`."""
    words = packed.contiguous().cpu().numpy().view(np.uint8)
    stream = np.unpackbits(words, axis=-1, count=shape[1] * bits, bitorder="little")
    unsigned = np.packbits(stream.reshape(*shape, bits), axis=-1, bitorder="little")[..., 0]
    return torch.from_numpy(unsigned).float() - (1 << (bits - 1))


FP8_STORED = Stored(
    ("", "_scale"),
    lambda _, numbers, scale: (numbers.to(FP8), scale),
    lambda numbers, scale: (numbers.float(), scale.float()),
)

STORED = {
    "fp8_e4m3": FP8_STORED,
    "fp8_e4m3_block128": FP8_STORED,
    "mxfp4": Stored(("_packed", "_scale"), _write_mxfp4, _read_mxfp4),
    "nvfp4": Stored(
        ("_packed", "_scale", "_global_scale"),
        _write_nvfp4,
        lambda packed, scale, outer: (decode(packed, "nvfp4"), scale.float() / outer),
    ),
    **{name: _integers_of(bits) for name, bits in BITS.items()},
}


def told(
    weight_format: str, kept: Iterable[str] = (), rounds_inputs: bool = False
) -> dict[str, Any]:
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


def drop_if_read(config: PretrainedConfig) -> None:
    """Have models be built without quantisation where their weights are read here as plain ones."""
    said = getattr(config, KEY, None)
    if isinstance(said, dict) and not unread(said):
        delattr(config, KEY)


def unread(config: Mapping[str, Any]) -> str:
    """What a `quantization_config` says that is not read here: `name=value`, or nothing."""
    if config.get("quant_method") != "compressed-tensors":
        return f"quant_method={config.get('quant_method')}"
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(name):
            return f"{name}={config[name]}"
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        return f"config_groups={sorted(groups)}"
    (group,) = groups.values()
    if group.get("input_activations"):
        return "input_activations"
    if not _format_of(config):
        return f"format={config.get('format')} with weights={_of_weights(config)}"
    return ""


def _format_of(config: Mapping[str, Any]) -> str:
    """The key of FORMATS, empty for none of them."""
    found = config.get("format"), _of_weights(config)
    for weight_format in FORMATS:
        ours = told(weight_format)
        if found == (ours["format"], _of_weights(ours)):
            return weight_format
    return ""


def _of_weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of them, without what is not asked for."""
    (group,) = config["config_groups"].values()
    said = group.get("weights") or {}
    return {key: value for key, value in said.items() if value and key not in UNREAD}
