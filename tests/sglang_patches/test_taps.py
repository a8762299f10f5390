"""Rows of an engine's batches get the keys of their prefixes; engines in earnest are in tests/e2e."""

from types import SimpleNamespace

import torch

from onpolicy.explain.taps.rows import prefix_keys
from sglang_patches.taps import Prefixes

SEQUENCES = [[5, 9, 9, 7, 3, 8], [5, 9, 2, 4]]
SLOTS = torch.tensor([[11, 3, 8, 1, 6, 2], [11, 3, 5, 9, 0, 0]])
"""The second request found its first two tokens in the cache: they are the first request's."""

RUNNER = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=SLOTS))


def batch(spans, is_decode):
    """(request, start, end) of the tokens that it is fed."""
    parts = [(SEQUENCES[i][start:end], SLOTS[i, start:end]) for i, start, end in spans]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: is_decode),
        input_ids=torch.tensor([token for tokens, _ in parts for token in tokens]),
        out_cache_loc=torch.cat([slots for _, slots in parts]),
        req_pool_indices=torch.tensor([i for i, _, _ in spans]),
        seq_lens=torch.tensor([end for _, _, end in spans]),
        extend_seq_lens=None if is_decode else torch.tensor([e - s for _, s, e in spans]),
    )


def test_chunks_cached_prefixes_and_decoding_go_on_from_the_key_before():
    prefixes = Prefixes()
    first, second = map(prefix_keys, SEQUENCES)
    for spans, is_decode, want, last in (
        ([(0, 0, 2)], False, first[:2], [1]),
        ([(0, 2, 5), (1, 2, 3)], False, [*first[2:5], second[2]], [2, 3]),
        ([(1, 3, 4), (0, 5, 6)], True, [second[3], first[5]], [0, 1]),
    ):
        keys, rows = prefixes.of(RUNNER, batch(spans, is_decode))
        assert (keys.tolist(), rows.tolist()) == (want, last)
