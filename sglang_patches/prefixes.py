"""Knows the rows of a batch by the tokens up to them, whichever request computed those.

A prefix may come from the cache, so the key of every cache slot's token is remembered, and a sequence
goes on from that of its last cached slot.
Source: ModelRunner.forward, sglang/srt/model_executor/model_runner.py.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.explain.taps.rows import prefix_keys


class Prefixes:
    """The keys of one process's batches; it must see every batch."""

    def __init__(self) -> None:
        self._key_of_slot: dict[int, int] = {}

    def of(self, runner: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of the rows of a batch, and the last row of each sequence, whose logits are wanted."""
        ends = batch.seq_lens.tolist()
        decodes = batch.forward_mode.is_decode()
        counts = [1] * len(ends) if decodes else [int(n) for n in batch.extend_seq_lens]
        slots = runner.req_to_token_pool.req_to_token
        keys: list[int] = []
        tokens, locations = batch.input_ids.tolist(), batch.out_cache_loc.tolist()
        for request, end, count in zip(batch.req_pool_indices.tolist(), ends, counts, strict=True):
            start, first = end - count, len(keys)
            before = self._key_of_slot.get(int(slots[request, start - 1]), 0) if start else 0
            keys += prefix_keys(tokens[first : first + count], before)
        self._key_of_slot.update(zip(locations, keys, strict=False))
        return torch.tensor(keys), torch.tensor(counts).cumsum(0) - 1
