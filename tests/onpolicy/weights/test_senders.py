"""Each engine has one sender, near it where there is one."""

from collections import Counter
from itertools import product

import pytest

from onpolicy.weights.push import share_out


@pytest.mark.parametrize(("ranks", "engines"), product((1, 2, 3, 8), (1, 2, 3, 8)))
def test_engines_of_one_host_are_spread_evenly_and_in_order_over_its_ranks(ranks, engines):
    senders = share_out([[True] * engines] * ranks, one_copy=False)
    counts = Counter(senders)
    assert len(senders) == engines and senders == sorted(senders)
    assert len(counts) == min(ranks, engines) and max(counts.values()) - min(counts.values()) <= 1
    if ranks >= engines:  # each by the first of the ranks that share its GPUs
        assert senders == [engine * ranks // engines for engine in range(engines)]
    assert share_out([[True] * engines] * ranks, one_copy=True) == [0] * engines


@pytest.mark.parametrize(
    ("hosts_of_ranks", "hosts_of_engines", "spread", "one_copy"),
    [
        ("aabb", "aabb", [0, 1, 2, 3], [0, 0, 2, 2]),
        ("ab", "ba", [1, 0], [1, 0]),
        ("aab", "abab", [0, 2, 1, 2], [0, 2, 0, 2]),
        ("aab", "cc", [0, 1], [0, 0]),  # no rank is near: all take part
        ("ab", "acbc", [0, 0, 1, 1], [0, 0, 1, 0]),
    ],
)
def test_an_engine_is_sent_to_from_its_own_host_if_a_rank_is_there(
    hosts_of_ranks, hosts_of_engines, spread, one_copy
):
    near = [[rank == engine for engine in hosts_of_engines] for rank in hosts_of_ranks]
    assert share_out(near, one_copy=False) == spread
    assert share_out(near, one_copy=True) == one_copy
