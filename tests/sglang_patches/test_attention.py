"""Keys of layers whose heads are smaller than the cache's; that a server reads them is an e2e test."""

import pytest
import torch

from sglang_patches.attention import as_wide_as

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
