"""Arguments of a layer's attention passed on to SGLang: window, soft cap and sinks.

Diverges in stock SGLang: its transformers backend takes a layer's window from the configuration,
one key longer than transformers means it (RadixAttention counts the keys before the query's own),
knows neither the windows of models without `layer_types` nor soft caps nor sinks, and ignores
unknown arguments. Here the layer's own call decides, as in the trainer, and arguments without an
operator are refused.

The cache keeps every key of every layer; SGLang's own cache for windows, which drops keys, is
turned off (`--disable-hybrid-swa-memory`).

Source: sglang_flash_attention_forward, sglang/srt/models/transformers.py. Can go when the backend
passes the arguments on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onpolicy.models.attention_function import scores_of
from sglang_patches import registry
from sglang_patches.engine_ranks import own_part

NAME = "sglang"
"""The name of the attention function of SGLang's transformers backend."""

LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install() -> None:
    registry.hook(LOAD_TARGET, _after_load, "after")


def _after_load(result: Any, *_: Any, **__: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = attention_forward
    return result


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_instances: dict[int, Any],
    forward_batch: Any,
    **named: Any,
) -> tuple[Tensor, None]:
    """Apply transformers' attention: [1, H, T, D] in, [T, H * D_v] of this rank's heads out."""
    scores = scores_of(module, query, attention_mask, **named)
    layer = attention_instances[module.layer_idx]  # type: ignore[index]
    layer.scaling, layer.logit_cap = scores.scale, scores.softcap or 0.0
    layer.sliding_window_size = (scores.window or 0) - 1
    _set_sizes(layer, query, key, value)
    # SGLang leaves a parameter whole on every tensor-parallel rank.
    sinks = scores.sinks
    extra = {} if sinks is None else {"sinks": own_part(sinks, layer.tp_q_head_num)}
    q, k, v = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    out = layer.forward(q, k, v, forward_batch=forward_batch, **extra)
    if (images := getattr(forward_batch, "image_attention", None)) is not None:
        out = images.correct(layer, q, out, scores)  # layer_images.py
    return out, None


def _set_sizes(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Set the sizes of this layer; [1, H, T, D] of this rank's heads or of all."""
    layer.head_dim = layer.qk_head_dim = query.shape[-1]
    layer.v_head_dim = value.shape[-1]
    kv_heads = key.shape[1] * layer.tp_q_head_num // query.shape[1]
    layer.tp_k_head_num = layer.tp_v_head_num = kv_heads
