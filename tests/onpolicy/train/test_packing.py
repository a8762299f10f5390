from hypothesis import given
from hypothesis import strategies as st

from onpolicy.train.packing import pack, split_evenly

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
