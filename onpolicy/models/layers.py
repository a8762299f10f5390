"""The decoder layers of a Hugging Face model, for any architecture."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

DROPPING = {"NemotronDecoderLayer"}
"""Classes of layers that accept keywords and pass none on to `self_attn` (transformers 5.12 to
5.19)."""


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, or of its decoder."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return next(m for m in lists if len(m) == count)


def hand_on_keywords(model: nn.Module) -> None:
    """Make layers that drop keywords pass on to `self_attn` those that it is not given already.

    Both engines pass the layout to attention by keyword.
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
