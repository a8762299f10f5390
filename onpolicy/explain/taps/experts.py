"""Experts of a layer as one operator, where rows are kept: no product of them is both engines'.

Before it stands the router's choice, as what the products are weighed by. A token's experts are in
ascending order, since engines may choose the same ones in another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onpolicy.explain.taps.recorder import CHOSEN_EXPERTS, Recorder

EXPERTS = "experts"
"""All products of experts, weighed and added up."""

ROUTING = "routing"
"""What a router makes of its logits: the weights of the experts that it chose."""


def whole_experts(name: str, module: nn.Module, recorder: Recorder) -> Iterable[RemovableHandle]:
    """Hooks of a module of `onpolicy.models.experts`, which pass its rows through a recorder."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if not recorder.takes_experts_whole:
            return None
        hidden, chosen, weights = _given(*args, **kwargs)
        chosen, weights, order = by_number(chosen, weights)
        chosen = recorder.passing(name, CHOSEN_EXPERTS, "made", chosen)
        weights = recorder.passing(name, ROUTING, "made", weights)
        hidden = recorder.passing(name, EXPERTS, "given", hidden)
        back = order.argsort(-1)  # an engine adds up in its router's order
        return (hidden, chosen.gather(-1, back), weights.gather(-1, back)), {}

    def after(_: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        if not recorder.takes_experts_whole:
            return None
        return recorder.passing(name, EXPERTS, "made", out)

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after)


def _given(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, ...]:
    return hidden_states, top_k_index, top_k_weights


def by_number(chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(experts [T, k] in ascending order, their weights, int64: where each of them was)"""
    chosen, order = chosen.long().sort(-1)
    return chosen, weights.gather(-1, order), order
