"""Leaves decoder layers to SGLang, where a partial contract aligns others.

Operators know which layer is running (`onpolicy.models.layers`). What takes the place of one of SGLang's
functions does so in aligned layers alone. SGLang has norms of its own for those of transformers: in its
own layers they stay. A mixture's experts have one form in all layers, the trainer's, so in SGLang's own
PyTorch's operators compute them, as in the trainer.
Source: replace_rms_norm_class and recursive_replace, sglang/srt/models/transformers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from onpolicy.contract import NumericsContract
from onpolicy.models.layers import layers_of_modules
from onpolicy.models.norms import is_norm
from onpolicy.ops import Operators
from onpolicy.ops.partial import running_layer
from sglang_patches import registry

REPLACE_TARGET = "sglang.srt.models.transformers.TransformersBase.recursive_replace"
NORM_TARGET = "sglang.srt.models.transformers.replace_rms_norm_class"


def replace(target: str, ours: Callable[..., Any], operators: Operators) -> None:
    """Have `ours` take the place of SGLang's function, where its layers are aligned."""
    if (running := running_layer(operators)) is None:
        registry.hook(target, ours, "replace")
        return

    def either(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return running.choose(ours, original)(*args, **kwargs)

    registry.hook(target, either, "around")


def is_running(operators: Operators) -> bool:
    """Whether the model is in a layer of SGLang's own."""
    running = running_layer(operators)
    return running is not None and not running.is_aligned


def keep_norms(contract: NumericsContract) -> set[nn.Module]:
    """Keep Hugging Face's norms in the layers that are aligned; what grows by those of the others."""
    own: set[nn.Module] = set()
    if not contract.layers:
        registry.hook(NORM_TARGET, lambda norm, hidden_size: norm, "replace")
        return own

    def find(model: Any) -> None:
        layers = layers_of_modules(model.model).items()
        own.update(m for m, layer in layers if is_norm(m) and not contract.aligns("norm", layer))

    def replace_own(original: Callable[..., nn.Module], norm: nn.Module, *args: Any) -> nn.Module:
        if norm not in own:
            return norm
        theirs = original(norm, *args)
        own.add(theirs)
        return theirs

    registry.hook(REPLACE_TARGET, find, "before")
    registry.hook(NORM_TARGET, replace_own, "around")
    return own
