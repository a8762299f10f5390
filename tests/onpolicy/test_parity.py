import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.parity import NOT_FINITE_ULP, ParityCounts, compare_log_probs, ulp_distance

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=20))
def test_equal_tensors_have_no_mismatch(values):
    x = torch.tensor(values)
    counts, first = compare_log_probs(x, x.clone())
    assert (counts.num_compared, counts.num_mismatched, counts.max_ulp, first) == (
        len(x),
        0,
        0,
        None,
    )
    assert counts.max_abs_diff == counts.sum_k3 == 0


@given(st.lists(floats, min_size=1, max_size=20), st.data())
def test_one_last_bit_is_found_where_it_is(values, data):
    x = torch.tensor(values)
    i = data.draw(st.integers(0, len(values) - 1))
    y = x.clone()
    y[i] = torch.nextafter(y[i], torch.tensor(math.inf))
    if not y[i].isfinite():
        return
    counts, first = compare_log_probs(x, y)
    assert (counts.num_mismatched, counts.max_ulp, first) == (1, 1, i)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_mismatch_even_on_both_sides(bad):
    x = torch.tensor([-1.0, bad, -2.0])
    counts, first = compare_log_probs(x, x.clone())
    assert (counts.num_mismatched, counts.max_ulp, first) == (1, NOT_FINITE_ULP, 1)


def test_both_zeros_are_equal():
    counts, _ = compare_log_probs(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert counts.num_mismatched == counts.max_ulp == 0


@given(floats, st.integers(0, 50))
def test_ulp_distance_counts_steps_across_zero(value, steps):
    start = end = torch.tensor([value])
    for _ in range(steps):
        end = torch.nextafter(end, torch.tensor(-math.inf))
    if end.isfinite().all():
        assert ulp_distance(start, end).item() == ulp_distance(end, start).item() == steps


def test_statistics_are_those_of_the_definition():
    train, rollout = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    counts, _ = compare_log_probs(train, rollout)
    metrics = (counts + ParityCounts()).metrics()
    assert metrics["train/train_rollout_logprob_abs_diff"] == 0.25
    assert metrics["train/k3_kl"] == pytest.approx((math.exp(0.5) - 0.5 - 1) / 2)
    assert counts.max_k3 == pytest.approx(math.exp(0.5) - 0.5 - 1)


@given(st.lists(floats, min_size=1, max_size=20), st.lists(floats, min_size=1, max_size=20))
def test_counts_of_parts_add_up(a, b):
    def counts(values):
        return compare_log_probs(torch.tensor(values), torch.tensor(values) + 1)[0]

    parts, whole = counts(a) + counts(b), counts(a + b)
    assert parts.num_mismatched == whole.num_mismatched
    assert parts.max_ulp == whole.max_ulp
    assert parts.sum_abs_diff == pytest.approx(whole.sum_abs_diff)


def test_nothing_to_compare_is_no_mismatch():
    counts, first = compare_log_probs(torch.tensor([]), torch.tensor([]))
    assert counts == ParityCounts() and first is None


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32"):
        compare_log_probs(torch.tensor([0.0]).bfloat16(), torch.tensor([0.0]))
