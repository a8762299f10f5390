"""Which columns a rank has, or a site of an operator that computes several."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onpolicy.explain.taps.digests import Part, cut
from onpolicy.explain.taps.recorder import Recorder
from onpolicy.explain.taps.scope import Scope


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
    layer.forward = lambda x: recorder.run("softmax", torch.exp, (x,), {})
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
