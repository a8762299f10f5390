"""The transformers attention function `onpolicy`, which calls the operators.

A layer passes keywords that say how its scores are computed (window, soft cap, sinks). Known
keywords are passed on. Any other keyword that could change the result raises an error, so that no
layer is computed without something that its model asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from onpolicy.errors import ContractError
from onpolicy.ops.layouts import ScoreRule

ATTENTION_NAME = "onpolicy"

AttentionFunction = Callable[[Tensor, Tensor, Tensor, ScoreRule], Tensor]
"""Attention of one layer with the layout bound in; see `Operators.attention`.

(q [T, H, D], k [T, H_kv, D], v [T, H_kv, D_v], scores) -> [T, H, D_v].
"""

IRRELEVANT = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "recurrence",
    "use_cache",
}
"""Keywords that do not change the attention of a causal decoder trained without dropout.

They ask for further outputs, or hold positions, which the layout already has, or the states of other
layers (`delta_net.py`).
"""


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
) -> ScoreRule:
    """Return the score rule that a layer's call asks for; query: [1, H, T, D].

    The arguments are named as in transformers' attention functions; `s_aux` are the sinks.
    Raise ContractError that names each argument without an aligned operator.
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
    return ScoreRule(scale, sliding_window or None, softcap or None, s_aux)


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
    """Call the operators from transformers' attention interface: [1, H, T, D] -> [1, T, H, D_v]."""
    scores = scores_of(module, query, attention_mask, **named)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_function(q, k, v, scores)[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
