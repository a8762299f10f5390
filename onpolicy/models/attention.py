"""transformers' attention interface, under the name `onpolicy`: from a layer's call to the operators.

A layer tells its attention function by keyword what is special about its scores. What is known is
handed on; anything else that could change the result is refused, so that no layer is computed
without something that its model asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from onpolicy.contract import AttentionShape
from onpolicy.errors import ConfigError, ContractError, in_one_line
from onpolicy.models.empty import empty_causal_lm
from onpolicy.ops.base import Scores

ATTENTION_NAME = "onpolicy"

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Scores, Tensor | None], Tensor]
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
) -> tuple[Scores, Tensor | None]:
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
    return Scores(scale, sliding_window or None, softcap or None), s_aux


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


def layer_shapes(config: PretrainedConfig, trust_remote_code: bool = False) -> list[AttentionShape]:
    """The attention that a model calls, layer after layer: its own code, run on the meta device.

    Raises ConfigError if the code cannot run there, or asks for what has no aligned operator.
    """
    # `batched_mm`: experts whose shapes do not depend on the routers' choice.
    model = empty_causal_lm(
        config,
        trust_remote_code,
        attn_implementation=ATTENTION_NAME,
        experts_implementation="batched_mm",
    )
    found: list[AttentionShape] = []

    def record(q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
        shape = AttentionShape(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[2],
            value_dim=v.shape[2],
            window=scores.window,
            softcap=scores.softcap,
            sinks=sinks is not None,
        )
        found.append(shape)
        return q.new_empty(*q.shape[:2], v.shape[2])

    tokens = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        model.eval().to("meta").base_model(
            input_ids=tokens, position_ids=tokens, use_cache=False, attention_function=record
        )
    except ContractError as error:
        raise ConfigError(f"model_type={config.model_type}: {error}") from error
    except Exception as error:  # whatever a model's own code raises
        raise ConfigError(
            f"model_type={config.model_type}: its layers cannot be run without numbers to see "
            f"what attention they call ({in_one_line(error)}). Choose another checkpoint, or run "
            "without --true-on-policy-mode."
        ) from error
    return found
