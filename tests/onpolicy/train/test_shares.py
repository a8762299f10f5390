import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from onpolicy.train.packing import pack
from onpolicy.train.shares import make_shares, split_evenly, split_into_steps
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
    held = [i for share in shares for i in share.samples]
    assert sorted(held) == list(range(len(samples)))
    for share in shares:
        assert all(share.samples[i] is samples[i] for i in share.samples)
        assert (share.outcomes.num_samples, share.num_tokens) == (len(lens), sum(lens))
        assert [i for step in share.steps for part in step for i in part] == list(share.samples)
    for step in range(num_steps):
        assert len({len(share.steps[step]) for share in shares}) == 1
    first = [i for share in shares for part in share.steps[0] for i in part]
    assert sorted(first) == list(range(len(first)))


def test_a_share_knows_the_samples_of_its_micro_batches():
    samples = samples_of([5, 5, 5, 5])
    share = make_shares(samples, num_steps=2, num_ranks=1, max_tokens=10)[0]
    assert share.micro_batches(1) == [{2: samples[2], 3: samples[3]}]


def test_outcomes_are_of_all_samples_in_their_groups():
    samples = samples_of([3, 5, 4])
    samples[1] = dataclasses.replace(samples[1], group=0)
    for share in make_shares(samples, num_steps=1, num_ranks=2, max_tokens=5):
        assert share.outcomes.lengths == [[2, 4], [3]]
        assert share.outcomes.rewards == [[1.0, 1.0], [1.0]]
        assert share.outcomes.episodes == [[0, 1], [2]]
        assert not share.outcomes.has_token_rewards


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
    rewarded = dataclasses.replace(samples[2].sample, token_rewards=[0.5, 0.0])
    samples[2] = dataclasses.replace(samples[2], sample=rewarded)
    for share in make_shares(samples, num_steps=1, num_ranks=2, max_tokens=5):
        assert share.outcomes.has_token_rewards
        assert share.outcomes.episodes == [[0, 1, 1]]


def test_a_step_has_whole_episodes_and_as_many_as_any_other():
    assert split_into_steps(in_episodes([3, 1, 1, 2]), 2) == [range(0, 4), range(4, 7)]
    share = make_shares(in_episodes([3, 1, 1, 2]), num_steps=2, num_ranks=1, max_tokens=99)[0]
    assert share.steps == [[[0, 1, 2, 3]], [[4, 5, 6]]]


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


@given(lens, st.integers(1, 5), st.integers(1, 150))
def test_the_plan_is_the_same_wherever_it_is_made(lens, ranks, budget):
    assert pack(lens, ranks, budget) == pack(list(lens), ranks, budget)


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
