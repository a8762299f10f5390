"""Keys of layers whose heads are smaller than the cache's; that a server reads them is an e2e test."""

import pytest
import torch

from onpolicy.ops import PagedLayout
from sglang_patches.attention import _as_read, as_wide_as

STORE = torch.zeros(10, 2, 8)


def test_smaller_heads_take_the_first_numbers_of_the_first_heads():
    x = torch.randn(3, 1, 5)
    wide = as_wide_as(STORE, x)
    assert wide.shape == (3, 2, 8) and torch.equal(wide[:, :1, :5], x)
    assert wide.count_nonzero() == x.numel()
    same = torch.randn(3, 2, 8)
    assert as_wide_as(STORE, same) is same


@pytest.mark.parametrize("shape", [(3, 4, 8), (3, 2, 9)])
def test_heads_that_the_cache_has_no_room_for_are_not_cut(shape):
    with pytest.raises(RuntimeError, match="must match"):
        as_wide_as(STORE, torch.randn(shape))


def test_of_a_cache_in_bytes_the_batch_s_slots_are_read_once_a_layer():
    table = torch.tensor([[7, 3, 5], [2, 2, 0]])
    layout = PagedLayout(
        page_table=table, page_size=1, key_lens=torch.tensor([3, 1]),
        query_starts=torch.tensor([0, 1, 2]), max_query_len=1,
    )  # fmt: skip
    slots, over_read = _as_read(layout)
    store = torch.randn(10, 4)
    assert torch.equal(store[slots][over_read.page_table], store[table])
    assert over_read.key_lens is layout.key_lens
