"""Hands a decoder's keyword arguments on to its attention, where its layers drop them.

Both engines tell attention by keyword what its layout is. Nemotron's decoder layers take every keyword
and hand none on (transformers 5.12 to 5.19).
"""

from __future__ import annotations

from typing import Any

from torch import nn

DROPPING = {"NemotronDecoderLayer"}
"""Classes of layers that hand no keyword on to `self_attn`."""


def hand_on_keywords(model: nn.Module) -> None:
    """Make such layers of `model` hand on what `self_attn` is not given already."""
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
