"""Writes a policy as a Hugging Face checkpoint, one file per bucket of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from onpolicy.models.weight_files import INDEX
from onpolicy.weights import WeightBucket


def export_checkpoint(
    buckets: Iterable[WeightBucket], directory: Path, source: Path, dtype: str
) -> None:
    """Write safetensors and their index; configuration and tokenizer come from `source`."""
    directory.mkdir()
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, bucket in enumerate(buckets):
        name = f"model-{number:05d}.safetensors"
        tensors = {key: tensor.contiguous().cpu() for key, tensor in bucket}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.suffix != ".bin":
            shutil.copy(file, directory)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
