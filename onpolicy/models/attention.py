"""transformers' attention interface, under the name `onpolicy`: from a layer's call to the operators.

A layer tells its attention function by keyword what is special about its scores. What is known is
handed on; anything else that could change the result is refused, so that no layer is computed
without something that its model asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from onpolicy.errors import ContractError
from onpolicy.ops.layouts import ScoreRule

ATTENTION_NAME = "onpolicy"

AttentionFunction = Callable[[Tensor, Tensor, Tensor, ScoreRule, Tensor | None], Tensor]
"""(q [T, H, D], k [T, H_kv, D], v [T, H_kv, D_v], scores, sinks [H] or None) -> [T, H, D_v], the
layout bound in; see `Operators.attention`."""

IRRELEVANT = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
"""Arguments that change nothing in a causal decoder that is not trained with dropout: what else is
asked for besides the result, and positions, which the layout has."""


def scores_of(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[ScoreRule, Tensor | None]:
    """What a layer's call asks of its scores, and its sinks; query: [1, H, T, D].

    The names are those of transformers' attention functions; `s_aux` are the sinks. Raises
    ContractError that names what has no aligned operator.
    """
    asked = {name for name, value in others.items() if value is not None} - IRRELEVANT
    asked |= {"attention_mask"} if attention_mask is not None else set()
    asked |= {"dropout"} if others.get("dropout") else set()
    asked |= {"is_causal=False"} if not getattr(module, "is_causal", True) else set()
    if asked:
        raise ContractError(
            f"{type(module).__name__} with {', '.join(sorted(asked))}: has no aligned operator. "
            "Choose another checkpoint, or run without --true-on-policy-mode."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return ScoreRule(scale, sliding_window or None, softcap or None), s_aux


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_function: AttentionFunction,
    **named: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, H, T, D] in, [1, T, H, D_v] out."""
    scores, sinks = scores_of(module, query, attention_mask, **named)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_function(q, k, v, scores, sinks)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
