"""Groups that are packed by what they have in common."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.train.packing import pack, pack_groups
from onpolicy.train.shares import make_shares
from tests.support.samples import make_train_sample, with_trajectory

tokens = st.lists(st.integers(0, 2), min_size=2, max_size=9)
groups = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=4)


def samples_of(groups):
    numbered = [(n, ids) for n, group in enumerate(groups) for ids in group]
    return [
        dataclasses.replace(
            make_train_sample(ids, 1, [0.0] * (len(ids) - 1), 1.0, n), episode=episode
        )
        for episode, (n, ids) in enumerate(numbered)
    ]


def distinct(samples):
    ids = [tuple(s.sample.token_ids) for s in samples]
    return len({x[: i + 1] for x in ids for i in range(len(x))})


@given(groups, st.integers(1, 3), st.integers(2, 30))
def test_every_sample_comes_once_and_no_micro_batch_has_more_distinct_tokens_than_it_may(
    groups, num_ranks, max_tokens
):
    samples = samples_of(groups)
    plan = pack_groups(samples, num_ranks, max_tokens)
    batches = [[samples[i] for i in batch] for rank in plan for batch in rank]
    assert sorted(i for rank in plan for batch in rank for i in batch) == [*range(len(samples))]
    assert len({len(rank) for rank in plan}) == 1
    for batch in batches:
        assert distinct(batch) <= max_tokens or len(batch) == 1


@given(groups, st.integers(2, 3), st.integers(2, 30))
def test_micro_batches_and_their_order_are_those_of_one_rank(groups, num_ranks, max_tokens):
    samples = samples_of(groups)
    (alone,) = pack_groups(samples, 1, max_tokens)
    ranks = pack_groups(samples, num_ranks, max_tokens)
    assert [batch for step in zip(*ranks, strict=True) for batch in step if batch] == alone


def test_a_group_stays_together_where_its_distinct_tokens_fit():
    prompt = [*range(3, 23)]
    samples = samples_of([[[*prompt, k] for k in range(4)], [[*prompt[1:], k] for k in range(4)]])
    share = make_shares(samples, 1, 1, 24, shares_prefixes=True)[0]
    assert share.shares_prefixes and share.steps == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert len(make_shares(samples, 1, 1, 24)[0].steps[0]) == 8


def test_a_group_that_is_too_large_comes_in_parts_that_begin_alike():
    prompt, a, b = [3] * 10, [4] * 5, [5] * 5
    (rank,) = pack_groups(samples_of([[prompt + a + [k] for k in (1, 2)] + [prompt + b]]), 1, 18)
    assert rank == [[0, 1], [2]]


def test_the_balance_counts_what_tokens_see():
    """Two samples of 4,000 tokens have more to see than four of 2,000."""
    lens = [4000, 4000, *[1999] * 4]
    samples = samples_of([[[n] * length] for n, length in enumerate(lens)])
    (rank,) = pack_groups(samples, 1, 8000)
    assert rank == [[0, 1], [2, 3, 4, 5]]


def test_tokens_of_other_experts_count_twice():
    prompt = [3] * 10
    samples = samples_of([[[*prompt, 4], [*prompt, 5]]])
    experts = [np.full((10, 2), k, dtype=np.int32) for k in (0, 1)]
    apart = [with_trajectory(s, routed_experts=x) for s, x in zip(samples, experts, strict=True)]
    assert pack_groups(samples, 1, 12) == [[[0, 1]]]
    assert pack_groups(apart, 1, 12) == [[[0], [1]]]


def test_costs_decide_the_order_and_tokens_what_fits():
    assert pack([5, 5, 5], 1, 10, costs=[1, 9, 5]) == [[[1, 2], [0]]]
