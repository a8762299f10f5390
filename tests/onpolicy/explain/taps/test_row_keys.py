"""Keys of prefixes, digests of rows, and which columns a rank has, or a site of several."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onpolicy.explain.taps.evidence import Scope
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.row_keys import Part, by_row, cut, digest, prefix_keys
from tests.support.violations import next_up

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@given(TOKENS, st.integers(0, 40))
def test_a_prefix_can_be_gone_on_from(tokens, cut):
    whole = prefix_keys(tokens)
    first = prefix_keys(tokens[:cut])
    assert whole == first + prefix_keys(tokens[cut:], first[-1] if first else 0)


@given(TOKENS, st.data())
def test_another_token_gives_another_key_from_there_on(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    others = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    a, b = prefix_keys(tokens), prefix_keys(others)
    assert a[:at] == b[:at]
    assert not set(a[at:]) & set(b)


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_ulp_of_one_number_shows_in_its_row_alone(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 33, generator=generator).to(dtype)
    y, row, column = x.clone(), seed % 7, seed % 33
    y[row, column] = next_up(y[row, column])
    assert (digest(x) != digest(y)).nonzero().tolist() == [[row]]


def test_the_digest_is_of_numbers_and_not_of_memory():
    x = torch.randn(6, 4, 5).bfloat16()
    assert torch.equal(digest(x), digest(x.float()))
    assert torch.equal(digest(x), torch.cat([digest(x[i : i + 1]) for i in range(6)]))
    assert torch.equal(digest(x.flatten(1)), digest(x.transpose(0, 1).contiguous().transpose(0, 1)))
    assert digest(torch.tensor([[0.0, 1.0]])) == digest(torch.tensor([[-0.0, 1.0]]))
    assert len(digest(torch.zeros(3, 0))) == 3


def test_rows_are_found_on_whichever_axis_they_are():
    x = torch.randn(1, 6, 4, 5)  # [1, T, H, D]
    by_head = x.transpose(1, 2)
    assert torch.equal(by_row(x, 6).reshape(6, -1), by_row(by_head, 6).reshape(6, -1))
    square = torch.randn(1, 4, 4, 5)  # as many heads as tokens
    assert torch.equal(by_row(square, 4), by_row(square.transpose(1, 2), 4))
    by_head = torch.randn(4, 4, 5).transpose(0, 1)  # [T, H, D], heads first in memory
    assert torch.equal(by_row(by_head, 4), by_head)
    assert by_row(torch.randn(1, 1, 9), 1).shape == (1, 9)


def taken(width, whole, ranks, **how):
    parts = (Part(rank=r, ranks=ranks, widths=((), (), (width,)), **how) for r in range(ranks))
    row = torch.arange(whole)[None]
    return [cut(row, part.of_result(0, whole))[0].tolist() for part in parts]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_the_parts_of_all_ranks_are_the_whole(size, ranks, pieces):
    parts = taken(pieces * size, pieces * size * ranks, ranks, pieces=pieces)
    by_piece = [part[i * size : (i + 1) * size] for i in range(pieces) for part in parts]
    assert [*chain(*by_piece)] == list(range(pieces * size * ranks))


def test_what_is_whole_on_every_rank_is_compared_with_each():
    assert taken(24, 24, 3) == [list(range(24))] * 3


def test_the_last_ranks_part_may_be_padded():
    assert taken(4, 7, 2) == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(("width", "whole", "ranks"), [(16, 32, 4), (5, 24, 4), (48, 24, 2)])
def test_copies_and_other_parts_are_refused(width, whole, ranks):
    """As heads of keys that two ranks each have a copy of."""
    with pytest.raises(LookupError):
        taken(width, whole, ranks)


def test_a_site_in_a_fused_result_is_shared_by_its_own_columns():
    fused = torch.tensor([4, 5, 10, 11])
    parts = taken(2, 12, 2, fused=fused)
    assert parts == [[4, 5], [10, 11]]
    assert taken(4, 12, 1, fused=fused) == [fused.tolist()]


def record(recorder, width):
    layer = nn.Identity()
    layer.forward = lambda x: recorder.run("softmax", torch.exp, x)
    recorder.scoped(layer, lambda *_: Scope(module="layer"))
    recorder.open(torch.tensor([7, 8]), torch.tensor([1]))
    layer(torch.arange(2.0 * width).view(2, width))
    return recorder.close()


def test_a_site_whose_parts_are_unknown_is_left_out():
    site = "layer", "softmax", 0
    trainer = Recorder()
    trainer.ranks = 2
    for widths, ranks in (((12,), [0, 1]), ((24,), [0, 1]), ((9,), [])):
        trainer.shares = {site: dict.fromkeys((0, 1), (widths, (), widths))}
        assert [call.rank for call in record(trainer, 24)] == ranks
