"""Rows of an engine's batches get the keys of their prefixes, and prefixes the tokens they are given.

Engines in earnest are in tests/e2e.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from onpolicy.explain.taps.rows import prefix_keys
from sglang_patches import registry
from sglang_patches.given_tokens import GivenTokens
from sglang_patches.prefixes import Prefixes
from tests.support.tiny_contract import CONTRACT

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


def test_a_given_token_takes_the_place_of_the_one_drawn(tmp_path):
    """Of the second sequence nothing is said; a prompt's chunk is not its end."""
    (tmp_path / "tokens.json").write_text(json.dumps([[SEQUENCES[0][:3], SEQUENCES[0][3:]]]))
    given = GivenTokens(str(tmp_path / "tokens.json"))
    drawn = torch.tensor([40, 41])
    for spans, is_decode, want in (
        ([(0, 0, 2), (1, 0, 1)], False, [40, 41]),
        ([(0, 2, 3), (1, 1, 3)], False, [7, 41]),
        ([(1, 3, 4), (0, 3, 4)], True, [40, 3]),
        ([(0, 4, 5)], True, [8]),
        ([(0, 5, 6)], True, [40]),
    ):
        tokens = drawn[: len(spans)].clone()
        given.watch(RUNNER, batch(spans, is_decode))
        given.overwrite(None, torch.zeros(len(spans), 50), [], [], tokens)
        assert tokens.tolist() == want


@pytest.mark.parametrize("is_there", [False, True])
def test_without_a_file_nothing_is_hooked(is_there, tmp_path, monkeypatch):
    hooked, file = [], tmp_path / "tokens.json"
    monkeypatch.setattr(registry, "hook", lambda target, *_: hooked.append(target))
    if is_there:
        file.write_text(json.dumps([[[1], [2]]]))
    GivenTokens(str(file)).install(CONTRACT)
    assert bool(hooked) == is_there
