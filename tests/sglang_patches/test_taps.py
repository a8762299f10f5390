"""What is recorded of an engine: keys of its batches' rows, and its own modules, here by others of their
names. Engines in earnest are in tests/e2e."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.row_keys import digest, prefix_keys
from sglang_patches import taps
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


class LinearBase(nn.Module):
    reduce_results = True

    def forward(self, x):
        return x + 1, None


class RowParallelLinear(LinearBase):
    reduce_results = False


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        mlp = nn.ModuleDict({"gate": LinearBase(), "down_proj": RowParallelLinear()})
        self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": mlp})])})
        self.logits_processor = SimpleNamespace(_compute_lm_head=None)

    def forward(self, x):
        mlp = self.model["layers"][0]["mlp"]
        mlp["gate"](x)
        mlp["down_proj"](x)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture
def recorded(monkeypatch):
    """Calls by sites of a model on two ranks that hold the same, so that a sum is twice a part."""
    monkeypatch.setattr(taps, "summed", lambda part: 2 * part)

    def record(blocks=1):
        model, recorder = Model(), Recorder()
        taps.watch_stock(model, recorder, blocks)
        recorder.open(torch.tensor([7, 8]), torch.tensor([1]))
        model(X)
        return {call.site: call for call in recorder.close()}

    return record


def test_a_linear_whose_sum_is_made_later_is_recorded_with_its_sum(recorded):
    calls = recorded()
    gate, down = (calls[f"layers.0.mlp.{name}", "linear", 0] for name in ("gate", "down_proj"))
    assert torch.equal(gate.outputs, digest(X + 1))
    assert torch.equal(down.outputs, digest(2 * (X + 1)))
    assert torch.equal(down.inputs, digest(X))


def test_linears_have_the_trainers_names_where_it_sums_in_blocks(recorded):
    calls = recorded(blocks=2)
    assert [*calls] == [
        ("layers.0.mlp.gate", "linear", 0), ("layers.0.mlp.down_proj", "row_parallel_linear", 0),
    ]  # fmt: skip
