"""Reads checkpoints of numbers and scales as the trainer does: into plain weights.

SGLang would build a quantised model, whose kernels round otherwise and which takes no plain weights when
they are pushed. So its configuration says nothing of them, and its loader hands on what they come to.
Source: HfModelConfigParser, sglang/srt/utils/hf_transformers/config.py;
DefaultModelLoader._get_weights_iterator, sglang/srt/model_loader/loader.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from onpolicy.models.compressed import Compressed, drop_if_read
from sglang_patches import registry

CONFIG_TARGET = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"
LOAD_TARGET = "sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator"


def install() -> None:
    registry.hook(CONFIG_TARGET, _without_quantisation, "after")
    registry.hook(LOAD_TARGET, _plain, "around")


def _without_quantisation(config: Any, *_: Any, **__: Any) -> Any:
    drop_if_read(config)
    return config


def _plain(
    original: Any, loader: Any, source: Any, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Tensor]]:
    weights = original(loader, source, *args, **kwargs)
    compressed = Compressed.of(Path(source.model_or_path), "--model-path")
    return weights if compressed is None else compressed.plain(weights)
