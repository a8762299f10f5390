from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.seeds import sampling_seed

keys = st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.integers(0, 9))


@given(st.sets(keys, min_size=2, max_size=50))
def test_every_key_has_a_seed_of_its_own(keys):
    seeds = {sampling_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_parts_of_the_key_do_not_run_together():
    assert sampling_seed(1, 23) != sampling_seed(12, 3)


def test_seeds_are_the_same_in_every_process_and_version():
    assert sampling_seed(0, "rollout", 3, 1, 2) == 2600601268320889156
