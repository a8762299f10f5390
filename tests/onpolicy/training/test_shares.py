import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.training.shares import (
    Outcomes,
    make_shares,
    pack,
    pack_groups,
    split_evenly,
    split_into_steps,
)
from tests.support.samples import make_train_sample, with_trajectory


def samples_of(lens):
    return [make_train_sample(range(n), 1, [0.0] * (n - 1), 1.0, i) for i, n in enumerate(lens)]


@given(
    lens=st.lists(st.integers(2, 20), min_size=1, max_size=12),
    num_steps=st.integers(1, 4),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(2, 40),
)
def test_the_shares_hold_every_sample_once_and_tell_what_there_is_in_all(
    lens, num_steps, num_ranks, max_tokens
):
    samples, num_steps = samples_of(lens), min(num_steps, len(lens))
    shares = make_shares(samples, num_steps, num_ranks, max_tokens)
    assert len(shares) == num_ranks
    held = [pair for share in shares for step in share for part in step for pair in part.items()]
    assert sorted(i for i, _ in held) == list(range(len(samples)))
    assert all(sample is samples[i] for i, sample in held)
    outcomes = Outcomes.of(samples, num_steps)
    assert (outcomes.num_samples, outcomes.num_tokens) == (len(lens), sum(lens))
    for step in range(num_steps):
        assert len({len(share[step]) for share in shares}) == 1
    first = [i for share in shares for part in share[0] for i in part]
    assert sorted(first) == list(range(len(first)))
    assert outcomes.sampled.later == sum(n - 1 for n in lens[len(first) :])


def test_a_share_has_the_samples_of_its_micro_batches():
    samples = samples_of([5, 5, 5, 5])
    share = make_shares(samples, num_steps=2, num_ranks=1, max_tokens=10)[0]
    assert share[1] == [{2: samples[2], 3: samples[3]}]


def test_outcomes_are_of_all_samples_in_their_groups():
    samples = samples_of([3, 5, 4])
    samples[1] = dataclasses.replace(samples[1], group=0)
    outcomes = Outcomes.of(samples, 1)
    assert outcomes.lengths == [[2, 4], [3]]
    assert outcomes.rewards == [[1.0, 1.0], [1.0]]
    assert outcomes.episodes == [[0, 1], [2]]
    assert not outcomes.has_token_rewards


def numbers_of(share):
    return [[[*part] for part in parts] for parts in share]


def in_episodes(sizes):
    """Samples of episodes with so many trajectories each."""
    samples = samples_of([3] * sum(sizes))
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [
        with_trajectory(dataclasses.replace(s, episode=n, group=0), forks=((str(i), 1),))
        for i, (s, n) in enumerate(zip(samples, numbers, strict=True))
    ]


def test_all_ranks_know_whether_tokens_have_rewards():
    samples = in_episodes([1, 2])
    samples[2] = dataclasses.replace(samples[2], token_rewards=[0.5, 0.0])
    outcomes = Outcomes.of(samples, 1)
    assert outcomes.has_token_rewards
    assert outcomes.episodes == [[0, 1, 1]]


def test_a_step_has_whole_episodes_and_as_many_as_any_other():
    assert split_into_steps(in_episodes([3, 1, 1, 2]), 2) == [range(0, 4), range(4, 7)]
    share = make_shares(in_episodes([3, 1, 1, 2]), num_steps=2, num_ranks=1, max_tokens=99)[0]
    assert numbers_of(share) == [[[0, 1, 2, 3]], [[4, 5, 6]]]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 8))
def test_no_episode_is_cut_and_no_step_has_two_more_than_another(sizes, num_steps):
    samples = in_episodes(sizes)
    steps = split_into_steps(samples, min(num_steps, len(sizes)))
    assert [i for step in steps for i in step] == list(range(len(samples)))
    held = [{samples[i].episode for i in step} for step in steps]
    assert sum(map(len, held)) == len(sizes)
    assert max(map(len, held)) - min(map(len, held)) <= 1


lens = st.lists(st.integers(1, 100), max_size=40)


@given(lens, st.integers(1, 5), st.integers(1, 150))
def test_every_sample_is_packed_once_within_the_budget_and_ranks_keep_step(lens, ranks, budget):
    plan = pack(lens, ranks, budget)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    packed = [i for micro_batches in plan for batch in micro_batches for i in batch]
    assert sorted(packed) == list(range(len(lens)))
    for batch in (batch for micro_batches in plan for batch in micro_batches):
        assert sum(lens[i] for i in batch) <= budget or len(batch) == 1


def packed_one_by_one(lens, max_tokens, costs):
    """The definition: costliest first, into the cheapest of all micro-batches that have room."""
    batches = []
    for i in sorted(range(len(lens)), key=lambda i: (-costs[i], i)):
        room = [b for b in batches if sum(lens[j] for j in b) + lens[i] <= max_tokens]
        if not room:
            batches.append(room := [])
            room = [room]
        min(room, key=lambda b: sum(costs[j] for j in b)).append(i)
    batches.sort(key=lambda b: -sum(costs[j] for j in b))
    return [sorted(b) for b in batches]


@given(st.data(), lens, st.integers(1, 150))
def test_each_goes_to_the_cheapest_micro_batch_with_room(data, lens, budget):
    (plan,) = pack(lens, 1, budget)
    assert [b for b in plan if b] == packed_one_by_one(lens, budget, lens)
    costs = [data.draw(st.integers(1, 9)) for _ in lens]
    (plan,) = pack(lens, 1, budget, costs)
    assert [b for b in plan if b] == packed_one_by_one(lens, budget, costs)


class Counted(int):
    """A number of tokens that counts how often it is added to others."""

    added = 0

    def __radd__(self, other):
        Counted.added += 1
        return int(other) + int(self)


def test_a_sample_is_compared_with_few_micro_batches_however_many_there_are():
    lens = [Counted(100 + i * 37 % 900) for i in range(2000)]
    assert len(pack(lens, 1, 2000)[0]) > 400
    assert Counted.added <= 3 * len(lens)


def test_the_budget_is_used():
    assert pack([10] * 8, 1, 40) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_no_samples_still_give_every_rank_a_micro_batch():
    assert pack([], 2, 10) == [[[]], [[]]]


@given(st.integers(0, 50), st.integers(1, 10))
def test_parts_are_consecutive_and_even(count, parts):
    ranges = split_evenly(count, parts)
    assert [i for part in ranges for i in part] == list(range(count))
    sizes = [len(part) for part in ranges]
    assert len(sizes) == parts and max(sizes) - min(sizes) <= 1


tokens = st.lists(st.integers(0, 2), min_size=2, max_size=9)
groups = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=4)


def grouped_samples(groups):
    numbered = [(n, ids) for n, group in enumerate(groups) for ids in group]
    return [
        dataclasses.replace(
            make_train_sample(ids, 1, [0.0] * (len(ids) - 1), 1.0, n), episode=episode
        )
        for episode, (n, ids) in enumerate(numbered)
    ]


def num_distinct(samples):
    ids = [tuple(s.token_ids) for s in samples]
    return len({x[: i + 1] for x in ids for i in range(len(x))})


@given(groups, st.integers(1, 3), st.integers(2, 30))
def test_every_sample_comes_once_and_no_micro_batch_has_more_distinct_tokens_than_it_may(
    groups, num_ranks, max_tokens
):
    samples = grouped_samples(groups)
    plan = pack_groups(samples, num_ranks, max_tokens)
    batches = [[samples[i] for i in batch] for rank in plan for batch in rank]
    assert sorted(i for rank in plan for batch in rank for i in batch) == [*range(len(samples))]
    assert len({len(rank) for rank in plan}) == 1
    for batch in batches:
        assert num_distinct(batch) <= max_tokens or len(batch) == 1


@given(groups, st.integers(2, 3), st.integers(2, 30))
def test_micro_batches_and_their_order_are_those_of_one_rank(groups, num_ranks, max_tokens):
    samples = grouped_samples(groups)
    (alone,) = pack_groups(samples, 1, max_tokens)
    ranks = pack_groups(samples, num_ranks, max_tokens)
    assert [batch for step in zip(*ranks, strict=True) for batch in step if batch] == alone


def test_a_group_stays_together_where_its_distinct_tokens_fit():
    prompt = [*range(3, 23)]
    samples = grouped_samples(
        [[[*prompt, k] for k in range(4)], [[*prompt[1:], k] for k in range(4)]]
    )
    share = make_shares(samples, 1, 1, 24, shares_prefixes=True)[0]
    assert numbers_of(share) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert len(make_shares(samples, 1, 1, 24)[0][0]) == 8


def test_a_group_that_is_too_large_comes_in_parts_that_begin_alike():
    prompt, a, b = [3] * 10, [4] * 5, [5] * 5
    (rank,) = pack_groups(
        grouped_samples([[prompt + a + [k] for k in (1, 2)] + [prompt + b]]), 1, 18
    )
    assert rank == [[0, 1], [2]]


def test_the_balance_counts_what_tokens_see():
    """Two samples of 4,000 tokens have more to see than four of 2,000."""
    lens = [4000, 4000, *[1999] * 4]
    samples = grouped_samples([[[n] * length] for n, length in enumerate(lens)])
    (rank,) = pack_groups(samples, 1, 8000)
    assert rank == [[0, 1], [2, 3, 4, 5]]


def test_tokens_of_other_experts_count_twice():
    prompt = [3] * 10
    samples = grouped_samples([[[*prompt, 4], [*prompt, 5]]])
    experts = [np.full((10, 2), k, dtype=np.int32) for k in (0, 1)]
    apart = [with_trajectory(s, routed_experts=x) for s, x in zip(samples, experts, strict=True)]
    assert pack_groups(samples, 1, 12) == [[[0, 1]]]
    assert pack_groups(apart, 1, 12) == [[[0], [1]]]


def test_costs_decide_the_order_and_tokens_what_fits():
    assert pack([5, 5, 5], 1, 10, costs=[1, 9, 5]) == [[[1, 2], [0]]]
