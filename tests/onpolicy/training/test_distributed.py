"""What ranks find together of their micro-batches."""

import pytest
import torch
import torch.distributed as dist

from onpolicy.training.distributed import (
    count_over_data,
    gather,
    gather_micro_batches,
    init_process_group,
    sum_micro_batches,
)
from onpolicy.training.shares import pack
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


def test_a_rank_alone_sends_nothing(monkeypatch):
    def sent(*args, **named):
        raise AssertionError("a message to itself")

    init_process_group()
    for name in ("all_gather_object", "all_reduce"):
        monkeypatch.setattr(dist, name, sent)
    assert gather("ours", None) == ["ours"]
    assert count_over_data({"b": 2, "a": 1}, torch.device("cpu")) == {"a": 1, "b": 2}
