"""Export of a policy or a critic as a Hugging Face checkpoint, one file per bucket of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from onpolicy.models.published import read_config
from onpolicy.models.text_part import has_text_part
from onpolicy.models.weight_files import INDEX, CheckpointReader
from onpolicy.weights.digest import WeightBucket, write_weights


def export_checkpoint(
    buckets: Iterable[WeightBucket],
    directory: Path,
    source: Path,
    dtype: str,
    *,
    has_values: bool = False,
) -> None:
    """Write safetensors and their index; copy configuration and tokenizer files from `source`.

    Of a text part the whole model is written: its other weights as they are in `source`. A critic is
    written as a text part alone.
    With `has_values` the checkpoint is a transformers token classifier with one label, where
    transformers has such a class for the architecture.
    """
    directory.mkdir()
    is_part = has_text_part(source)
    if is_part and not has_values:
        buckets = CheckpointReader(source).whole(buckets)
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
    if has_values:
        config = read_config(str(source)).to_dict() if is_part else config
        config |= _as_token_classifier(config)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))


def _as_token_classifier(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json fields of a token classifier that gives every token one number."""
    known = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(str(config["model_type"]))
    return {
        "architectures": [known] if known else config.get("architectures"),
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
