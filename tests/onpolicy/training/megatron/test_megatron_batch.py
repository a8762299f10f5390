"""The zigzag: every token has one holder, and every query meets exactly the keys before it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.models.shared_prefixes import share_prefixes
from onpolicy.training.megatron.megatron_batch import FILLER_TOKEN, LocalTokens
from tests.support.megatron_ranks import pack, random_sequences

LENS = st.lists(st.integers(2, 40), min_size=1, max_size=5)


def localize(batch, ranks, multiple=1):
    config = SimpleNamespace(
        tensor_model_parallel_size=multiple,
        sequence_parallel=multiple > 1,
        context_parallel_size=ranks,
    )
    return [LocalTokens.of(batch, config, rank) for rank in range(ranks)]


@settings(max_examples=40)
@given(lens=LENS, ranks=st.sampled_from([2, 3, 4]), multiple=st.sampled_from([1, 2, 4]))
def test_every_rank_holds_as_many_rows_and_every_token_is_asked_for_once(lens, ranks, multiple):
    batch = pack(random_sequences(*lens))
    parts = localize(batch, ranks, multiple)
    assert len({part.tokens.shape for part in parts}) == 1
    assert parts[0].tokens.shape[1] % multiple == 0
    targets = torch.cat([part.asked.targets for part in parts])[parts[0].order]
    assert torch.equal(targets, batch.targets)
    before = torch.cat([part.tokens[0][part.asked.rows] for part in parts])[parts[0].order]
    assert torch.equal(before, batch.tokens[batch.rows])
    positions = torch.cat([part.positions[0][part.asked.rows] for part in parts])[parts[0].order]
    assert torch.equal(positions, batch.positions[batch.rows])


@settings(max_examples=40)
@given(lens=LENS, ranks=st.sampled_from([2, 3]))
def test_a_chunk_of_queries_ends_where_its_keys_end(lens, ranks):
    batch = pack(random_sequences(*lens))
    parts = localize(batch, ranks)
    stored = torch.cat([part.tokens[0] for part in parts])
    for part in parts:
        rows = iter(part.tokens[0].tolist())
        for layout in part.layouts:
            for s, (queries, keys) in enumerate(
                zip(layout.query_lens, layout.key_lens, strict=True)
            ):
                seen = stored[layout.key_rows[s][:keys]].tolist()
                sequence = batch.tokens.split(batch.layout.query_lens)[s].tolist()
                padded = sequence + [FILLER_TOKEN] * 2 * ranks
                assert seen == padded[:keys]
                assert seen[keys - queries :] == [next(rows) for _ in range(queries)]


@pytest.mark.parametrize("lens", [(5,), (4, 3)])
def test_without_context_parallelism_only_a_filler_sequence_is_added(lens):
    batch = pack(random_sequences(*lens))
    (local,) = localize(batch, 1, multiple=4)
    assert local.tokens.shape == (1, 8)
    assert torch.equal(local.tokens[0][: sum(lens)], batch.tokens)
    assert local.layouts[0].query_lens == (*lens, 8 - sum(lens))
    assert local.asked is batch and local.order is None
    (same,) = localize(batch, 1)
    assert same.layouts == (batch.layout,)


def test_a_filler_follows_sequences_that_share_their_beginning():
    first, second = random_sequences(9, 3)
    shared = share_prefixes(pack([first, first[:6] + second]))
    (local,) = localize(shared, 1, multiple=8)
    (layout,) = local.layouts
    assert layout.query_lens == (9, 3, 4) and layout.key_lens == (9, 9, 4)
    keys = [rows[:n] for rows, n in zip(layout.key_rows, layout.key_lens, strict=True)]
    assert [x.tolist() for x in keys] == [[*range(9)], [*range(6), 9, 10, 11], [12, 13, 14, 15]]
    assert torch.equal(layout.shared_keys.rows, torch.cat(keys))
    read = torch.zeros(len(layout.shared_keys.rows), dtype=torch.int64)
    for run, lie in layout.shared_keys.runs:
        read[run] = torch.arange(lie.start, lie.stop)
    assert torch.equal(read, layout.shared_keys.rows)
