"""What tensor-parallel ranks hold and report together, and styles of plans as SGLang reads them."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models import transformers as backend

from onpolicy.models.tensor_parallel import STYLES, engine_style
from sglang_patches import engine_ranks
from sglang_patches.engine_ranks import agreed, gathered, own_part, shard
from tests.support.ranks import on_ranks

WHOLE = torch.arange(137 * 96).view(137, 96)


@pytest.mark.parametrize(
    ("shape", "rank", "rows", "columns"),
    [
        ((137, 96), 1, (0, 137), (0, 96)),  # a copy on every rank
        ((192, 96), 0, (0, 137), (0, 96)),  # one rank, padded to a multiple of 64
        ((96, 96), 0, (0, 96), (0, 96)),
        ((96, 96), 1, (96, 137), (0, 96)),
        ((48, 96), 3, (137, 137), (0, 96)),  # nothing but padding
        ((137, 48), 1, (0, 137), (48, 96)),
    ],
)
def test_a_rank_holds_its_equal_part_of_an_axis(shape, rank, rows, columns):
    part = shard(WHOLE, torch.empty(shape), rank)
    assert torch.equal(part, WHOLE[slice(*rows), slice(*columns)])


def test_a_vector_is_shared_as_a_matrix_is():
    assert shard(torch.arange(8), torch.empty(2), 3).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((137, 96), 1), ((137, 96), 2), ((192, 96), 1), ((96, 96), 2), ((48, 96), 3), ((137, 48), 2)],
)
def test_the_whole_is_gathered_from_what_ranks_hold_of_it(shape, ranks, monkeypatch):
    """With padding and without, by rows and by columns, and a copy of it even if nothing is shared."""
    group = SimpleNamespace(world_size=ranks, device_group=None)
    monkeypatch.setattr(engine_ranks, "_group", lambda: group)

    def gather(rank):
        own = torch.full(shape, -1)
        part = shard(WHOLE, own, rank)
        own[tuple(map(slice, part.shape))] = part
        return gathered(own, WHOLE.shape), own

    for found, own in on_ranks(ranks, gather):
        assert torch.equal(found, WHOLE) and found.data_ptr() != own.data_ptr()


def test_ranks_that_agree_report_as_one():
    report = {"weights": "ab", "self_check": {"linear": "12"}}
    assert agreed([report, dict(report)]) == report


def test_a_rank_that_differs_is_seen_by_name():
    merged = agreed([{"a": "1", "self_check": {"linear": x, "silu": "3"}} for x in ("7", "8")])
    assert merged["a"] == "1" and merged["self_check"]["silu"] == "3"
    assert merged["self_check"]["linear"] == "ranks differ: ['7', '8']"


def test_a_rank_that_says_less_differs():
    assert str(agreed([{"weights": "ab"}, {}])).startswith("ranks differ: ")


OURS = {"colwise_gather_output": "colwise_rep", "rowwise_split_input": "rowwise_rep"}


@pytest.mark.parametrize("style", STYLES)
def test_a_style_that_sglang_knows_is_read_as_it_reads_it(style):
    if style in OURS:
        assert engine_style(style) == OURS[style]
    else:
        assert engine_style(style) == backend._normalize_tp_style(style)


@pytest.mark.parametrize("style", ["mla_kv_a_proj", "anything"])
def test_layers_of_another_style_stay_whole(style):
    assert engine_style(style) == "replicate"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_own_heads_out_of_all_of_them(rank, monkeypatch):
    class Group:
        world_size, rank_in_group = 2, rank

    monkeypatch.setattr(engine_ranks, "_group", Group)
    x = torch.arange(12).view(2, 6)
    assert torch.equal(own_part(x, 3), x[:, 3 * rank : 3 * rank + 3])
    assert own_part(x, 6) is x
