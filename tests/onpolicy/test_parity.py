import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ParityError
from onpolicy.parity import (
    NOT_FINITE_ULP,
    ParityCounts,
    compare_draws,
    compare_log_probs,
    mismatches,
    ulp_distance,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=20))
def test_equal_tensors_have_no_mismatch(values):
    x = torch.tensor(values)
    counts, first = compare_log_probs(x, x.clone())
    assert (counts.num_compared, counts.num_mismatched, counts.max_ulp, first) == (
        len(x), 0, 0, None,
    )  # fmt: skip
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


@pytest.mark.parametrize("pair", [(0.0, -0.0), (-0.0, 0.0)])
def test_the_two_zeros_are_different_bits_and_no_number_apart(pair):
    counts, first = compare_log_probs(*(torch.tensor([-1.0, x]) for x in pair))
    assert (counts.num_mismatched, counts.max_ulp, first) == (1, 0, 1)
    same = torch.tensor([pair[0]])
    assert compare_log_probs(same, same.clone())[0].num_mismatched == 0


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8), st.data())
def test_values_agree_where_their_bits_do_and_are_finite(bits, data):
    others = [data.draw(st.sampled_from([x, x ^ 1, x ^ -(2**31), ~x])) for x in bits]
    a, b = (torch.tensor(x, dtype=torch.int32).view(torch.float32) for x in (bits, others))
    finite = a.isfinite() & b.isfinite()
    expected = [x != y or not z for x, y, z in zip(bits, others, finite.tolist(), strict=True)]
    assert mismatches(a, b).tolist() == expected
    # Bits of every other number stand beside those that count.
    strided = torch.stack([a, b], dim=1)[:, 0]
    assert mismatches(strided, b).tolist() == expected


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


def test_where_nothing_was_compared_no_distance_says_that_the_engines_agree():
    """As in a step whose samples all lag: 0 would be drawn beside runs that do agree."""
    assert ParityCounts().metrics() == {
        "parity/num_compared_tokens": 0, "parity/num_mismatched_tokens": 0
    }  # fmt: skip


@given(st.lists(floats, min_size=1, max_size=20), st.lists(floats, min_size=1, max_size=20))
def test_counts_of_parts_add_up(a, b):
    def counts(values):
        return compare_log_probs(torch.tensor(values), torch.tensor(values) + 1)[0]

    parts, whole = counts(a) + counts(b), counts(a + b)
    assert parts.num_mismatched == whole.num_mismatched
    assert parts.max_ulp == whole.max_ulp
    assert parts.sum_abs_diff == pytest.approx(whole.sum_abs_diff)


@pytest.mark.parametrize("shapes", [((0,), (0,)), ((3,), (1,)), ((1,), (3,)), ((2, 1), (2, 1))])
def test_what_was_not_compared_one_to_one_is_a_failure(shapes):
    a, b = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ParityError, match=re.escape(f"train={[*shapes[0]]}, rollout=")):
        compare_log_probs(a, b)


def test_tokens_that_were_drawn_otherwise_are_counted_and_those_not_drawn_again_are_not():
    drawn, sampled = torch.tensor([4.0, math.nan, 7.0, 9.0]), torch.tensor([4, 5, 6, 7])
    counts, first = compare_draws(drawn, sampled)
    assert (counts.num_redrawn, counts.num_drawn_otherwise, first) == (3, 2, 2)
    counts, first = compare_draws(drawn[:2], sampled[:2])
    assert (counts.num_redrawn, counts.num_drawn_otherwise, first) == (1, 0, None)
    with pytest.raises(ParityError, match=r"drawn=\[4\], sampled=\[1\]"):
        compare_draws(drawn, sampled[:1])


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32"):
        compare_log_probs(torch.tensor([0.0]).bfloat16(), torch.tensor([0.0]))
