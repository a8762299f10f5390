"""Writes a policy as a Hugging Face checkpoint, one file per bucket of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from onpolicy.models.weight_files import INDEX
from onpolicy.weights.digest import WeightBucket, write_weights


def export_checkpoint(
    buckets: Iterable[WeightBucket], directory: Path, source: Path, dtype: str
) -> None:
    """Write safetensors and their index; configuration and tokenizer come from `source`."""
    directory.mkdir()
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, bucket in enumerate(buckets):
        name = f"model-{number:05d}.safetensors"
        write_weights(bucket, directory / name)
        weight_map.update(dict.fromkeys((key for key, _ in bucket), name))
        total_size += sum(tensor.nbytes for _, tensor in bucket)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name and file.suffix != ".bin":
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
