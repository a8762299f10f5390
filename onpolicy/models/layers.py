"""The decoder layers of a Hugging Face model, whatever its architecture."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

DROPPING = {"NemotronDecoderLayer"}
"""Classes of layers that take keywords and hand none on to `self_attn` (transformers 5.12 to 5.19)."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal LM, or of its decoder."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return next(m for m in lists if len(m) == count)


def hand_on_keywords(model: nn.Module) -> None:
    """Make layers that drop keywords hand on what `self_attn` is not given already.

    Both engines tell attention by keyword what its layout is.
    """
    for layer in model.modules():
        if type(layer).__name__ in DROPPING:
            _hand_on(layer)


def _hand_on(layer: Any) -> None:
    given: dict[str, Any] = {}

    def remember(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given.clear()
        given.update(kwargs)

    def add(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, **kwargs}

    layer.register_forward_pre_hook(remember, with_kwargs=True)
    layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)
