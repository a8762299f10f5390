"""Numbers in arrays: they compare as lists do, keep every bit, and grow at the cost of what is added."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.system.number_arrays import Doubles, Flags, Floats, Ints

LISTS = {
    Ints: st.lists(st.integers(-(1 << 31), (1 << 31) - 1)),
    Flags: st.lists(st.booleans()),
    Floats: st.lists(st.floats(width=32, allow_nan=False)),
    Doubles: st.lists(st.floats(allow_nan=False)),
}
KINDS = [*LISTS]


def bits(numbers):
    return (type(numbers), numbers.array.dtype, numbers.array.tobytes())


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_numbers_are_what_a_list_of_them_is(kind, data):
    values, more = data.draw(LISTS[kind]), data.draw(LISTS[kind])
    start, end = data.draw(st.integers(-9, 9)), data.draw(st.integers(-9, 9))
    numbers = kind(values)
    assert numbers == values and numbers.tolist() == [*numbers] == values
    assert [type(each) for each in numbers] == [type(each) for each in values]
    assert numbers[start:end] == values[start:end] and len(numbers) == len(values)
    assert numbers + more == values + more and numbers == values
    assert bool(numbers) == bool(values) and repr(numbers) == repr(values)
    if values:
        assert numbers[-1] == values[-1] and numbers.index(values[-1]) == values.index(values[-1])
        assert numbers != [*values[:-1]] and numbers != kind(values[:-1])


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_a_sequence_that_grows_in_any_order_never_changes_another(kind, data):
    """Branches go on from any sequence there is, from its beginning too."""
    known = [([], kind())]
    for more in data.draw(st.lists(LISTS[kind], max_size=12)):
        values, numbers = known[data.draw(st.integers(0, len(known) - 1))]
        cut = data.draw(st.integers(0, len(values)))
        known += [(values + more, numbers + more), (values[:cut] + more, numbers[:cut] + more)]
    for values, numbers in known:
        assert numbers == values


def test_a_turn_is_written_behind_the_others_and_copies_none_of_them():
    so_far, copies = Ints(range(1000)), 0
    for turn in range(1000):
        longer = so_far + [turn] * 8
        copies += longer.array.base is not so_far.array.base
        so_far = longer
    assert copies <= 25, "each at an eighth more than before"
    assert so_far == [*range(1000), *(turn for turn in range(1000) for _ in range(8))]
    assert so_far.array.base.nbytes <= 1.125 * so_far.array.nbytes


def test_a_branch_of_all_tokens_goes_on_without_a_copy_and_the_next_gets_one():
    trunk = Ints(range(64)) + [1]
    first, second = trunk[:], trunk[:65]
    one, other = first + [2], second + [3]
    assert one.array.base is trunk.array.base and other.array.base is not trunk.array.base
    assert (one[-1], other[-1], [*trunk]) == (2, 3, [*range(64), 1])


def test_of_threads_that_continue_one_sequence_each_has_its_own():
    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            trunk, ready = Ints(range(number + 64)) + [7], Barrier(4)

            def go_on(mark, trunk=trunk, ready=ready):
                ready.wait()
                return trunk + [mark]

            assert [each[-1] for each in pool.map(go_on, range(4))] == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_pickles_keep_every_bit(kind, data):
    numbers = kind(data.draw(LISTS[kind]))
    assert bits(pickle.loads(pickle.dumps(numbers))) == bits(numbers)


def test_equal_numbers_travel_as_one_and_only_if_they_are_the_same_bits():
    assert len(pickle.dumps(Doubles([0.7] * 4096))) < 200
    zeros = Floats([0.0, -0.0, 0.0])
    assert np.signbit(pickle.loads(pickle.dumps(zeros)).array).tolist() == [False, True, False]
    quiet, other = np.array([0x7FC00000, 0x7FC00001], "<u4").view("<f4")
    assert bits(pickle.loads(pickle.dumps(Floats([quiet, other])))) == bits(Floats([quiet, other]))


def test_what_arrived_goes_on_too():
    arrived = pickle.loads(pickle.dumps(Ints([3, 4])))
    assert arrived + [] == [3, 4] and arrived + [5] == [3, 4, 5]


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        Ints([1 << 31])
    with pytest.raises(OverflowError):
        Ints([1]) + [-(1 << 40)]
