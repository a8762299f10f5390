"""Aligned attention as an SGLang attention backend.

One function serves prefill, chunked prefill with a cached prefix, and decode. It is registered
under the name `torch_native`, since SGLang decides by that name that its cache allocators must not
call Triton (sglang/srt/mem_cache/allocation.py). Can go when SGLang asks the platform instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from onpolicy.ops import Operators, PagedLayout, ScoreRule
from sglang_patches import registry
from sglang_patches.platform import ATTENTION_BACKEND


def install(operators: Operators) -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        return _backend_class()(runner, operators)

    registry.note(f"attention backend {ATTENTION_BACKEND}")


def layer_scores(layer: Any, sinks: torch.Tensor | None = None) -> ScoreRule:
    """Return a RadixAttention's score rule; its window counts the keys before the query's own."""
    window = (layer.sliding_window_size + 1) or None
    return ScoreRule(layer.scaling, window, layer.logit_cap or None, sinks)


def as_wide_as(store: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `x` [T, heads, numbers], padded with zeros to the size of a row of `store`."""
    if x.shape[1:] == store.shape[1:]:
        return x
    wide = x.new_zeros(len(x), *store.shape[1:])
    wide[:, : x.shape[1], : x.shape[2]] = x
    return wide


def _layout(forward_batch: Any, slots: torch.Tensor) -> PagedLayout:
    """Return the layout of a batch's keys; slots: [requests, tokens], the cache slot of each token."""
    key_lens, mode = forward_batch.seq_lens.int(), forward_batch.forward_mode
    query_lens = torch.ones_like(key_lens) if mode.is_decode() else forward_batch.extend_seq_lens
    return PagedLayout(
        page_table=slots[forward_batch.req_pool_indices, : int(key_lens.max())],
        page_size=1,
        key_lens=key_lens,
        query_starts=F.pad(query_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_query_len=int(query_lens.max()),
    )


def _backend_class() -> type:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class AlignedAttentionBackend(TorchNativeAttnBackend):
        """An attention backend that writes keys and values into the pool, and attends over it."""

        def __init__(self, runner: Any, operators: Operators):
            super().__init__(runner)
            self.operators = operators
            self.layout: PagedLayout | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self.layout = _layout(forward_batch, self.req_to_token_pool.req_to_token)

        def forward_extend(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            sinks: torch.Tensor | None = None,
            **_: Any,
        ) -> torch.Tensor:
            keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            if save_kv_cache:
                location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
                k, v = as_wide_as(keys, k), as_wide_as(values, v)
                self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
            assert self.layout is not None
            out = self.operators.paged_attention(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                keys[:, : layer.tp_k_head_num, : layer.qk_head_dim][:, None],
                values[:, : layer.tp_v_head_num, : layer.v_head_dim][:, None],
                self.layout,
                layer_scores(layer, sinks),
            )
            return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

        forward_decode = forward_extend

    return AlignedAttentionBackend
