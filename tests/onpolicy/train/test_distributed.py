"""What ranks find together of their micro-batches."""

import pytest

from onpolicy.train.distributed import gather_micro_batches, sum_micro_batches
from onpolicy.train.packing import pack
from tests.support.ranks import on_ranks

LENS = [90, 80, 70, 60, 50]
VALUES = [1e16, 1.0, -1e16, 1.0, 3.0]
"""Of the micro-batches that one rank has, in its order: any other order has another sum."""


def by_rank(ranks, values):
    """The values of every rank's micro-batches; a filler's is -0.0."""
    [alone] = pack(LENS, 1, 100)
    plan = pack(LENS, ranks, 100)
    order = [part[0] for part in alone]
    return [[values[order.index(part[0])] if part else -0.0 for part in own] for own in plan]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_micro_batches_come_in_the_order_of_one_rank(ranks):
    shares = by_rank(ranks, VALUES)
    found = on_ranks(ranks, lambda rank: gather_micro_batches(shares[rank]))
    assert all(values[: len(VALUES)] == VALUES for values in found)
    sums = on_ranks(ranks, lambda rank: sum_micro_batches([{"x": x} for x in shares[rank]]))
    assert sums == [{"x": sum(VALUES)}] * ranks


def test_ranks_that_sum_their_own_first_have_another_sum():
    """So the test above would notice."""
    assert sum(sum(share) for share in by_rank(2, VALUES)) != sum(VALUES)
