import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.mismatch_metrics import estimator_report
from fallback_correction.tokens import TokenBatch
from tests.support.token_batches import batches, by_log_ratios, on_ranks, spread_batches

NAMES = ["no_is"] + [
    f"{level}_{kind}" for level in ("token", "sequence") for kind in ("is", "tis", "mis")
]
LOG2 = math.log(2)


def report(batch, advantages=None, **options):
    if advantages is None:
        advantages = torch.ones(len(batch.mask))
    found = estimator_report(batch, advantages, **options)
    return {name.removeprefix("estimator/"): value for name, value in found.items()}


def test_every_estimator_exactly():
    # Ratios 4, 1/2 | 1/2 | a masked sequence; the products are 2 and 1/2. The bound is 1.5.
    batch = by_log_ratios([[2 * LOG2, -LOG2], [-LOG2, 9.0], [9.0]], [[1, 1], [1, 0], [0]])
    advantages = torch.tensor([-2.0, -2.0, 1.0, 5.0, 5.0])
    # By sequence: sum of |A| |w - rho|, and the square of the sum of |A| w.
    bias = {
        "no_is": (2 * (1 + 1), 0.5), "token_is": (2 * (2 + 1.5), 0.0),
        "token_tis": (2 * (0.5 + 1.5), 0.0), "token_mis": (2 * (2 + 1.5), 0.0),
        "sequence_is": (0.0, 0.0), "sequence_tis": (2 * (0.5 + 0.5), 0.0),
        "sequence_mis": (2 * (2 + 2), 0.0),
    }  # fmt: skip
    size = {
        "no_is": (4.0, 1.0), "token_is": (9.0, 0.5), "token_tis": (4.0, 0.5),
        "token_mis": (1.0, 0.5), "sequence_is": (8.0, 0.5), "sequence_tis": (6.0, 0.5),
        "sequence_mis": (0.0, 0.5),
    }  # fmt: skip
    expected = {}
    for name in NAMES:
        expected[f"{name}_bias"] = pytest.approx(sum(bias[name]) / 2, abs=1e-6)
        expected[f"{name}_variance"] = pytest.approx(sum(x * x for x in size[name]) / 2 / 2)
    assert report(batch, advantages, upper=1.5) == expected


@given(batches())
def test_identical_engines_leave_no_bias_and_one_variance(batch):
    log_probs = batch.rollout_log_probs
    batch = TokenBatch.packed(log_probs, log_probs, batch.lengths.tolist(), batch.mask)
    found = report(batch, torch.randn(len(batch.mask)))
    assert [found[f"{name}_bias"] for name in NAMES] == [0.0] * len(NAMES)
    assert len({found[f"{name}_variance"] for name in NAMES}) == 1


@given(batches())
def test_sequence_importance_sampling_has_no_bias(batch):
    assert report(batch)["sequence_is_bias"] == 0


@given(batches(), st.sampled_from([0.5, 1.0, 2.0]))
def test_bounds_lower_the_variance_and_masks_lower_it_further(batch, upper):
    found = report(batch, upper=upper)
    for level in ("token", "sequence"):
        masked, truncated, unbounded = (
            found[f"{level}_{kind}_variance"] for kind in ("mis", "tis", "is")
        )
        assert masked <= truncated <= unbounded


@pytest.mark.parametrize("r", [0.01, -0.01])
def test_the_bias_of_token_weights_grows_as_the_square_of_the_length(r):
    bias = {n: report(by_log_ratios([[r] * n]))["token_is_bias"] for n in (1, 2, 4, 8, 16, 32)}
    assert bias[1] == 0
    assert all(bias[2 * n] > 2 * bias[n] for n in (1, 2, 4, 8, 16))
    exact = {n: n * abs(math.exp(n * r) - math.exp(r)) for n in bias}
    assert bias == {n: pytest.approx(value, rel=1e-4) for n, value in exact.items()}


def test_more_responses_lower_the_variance_and_leave_the_bias():
    sequence = [0.5, -0.25]
    one, four = report(by_log_ratios([sequence])), report(by_log_ratios([sequence] * 4))
    for name in NAMES:
        assert four[f"{name}_bias"] == one[f"{name}_bias"]
        assert four[f"{name}_variance"] == one[f"{name}_variance"] / 4


@given(spread_batches())
def test_the_report_has_the_same_bits_in_any_order_and_split(case):
    batch, parts = case

    def of(part, gather):
        return estimator_report(part, part.rollout_log_probs + 1, gather=gather)

    whole = of(batch, lambda values: values)
    assert on_ranks([part for part, _ in parts], of) == [whole] * len(parts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_not_finite_are_left_out(value):
    with_them = by_log_ratios([[0.5, value], [-0.25], [value]])
    without = by_log_ratios([[0.5], [-0.25]])
    assert report(with_them) == report(without)


@pytest.mark.parametrize("r", [40.0, -40.0])
def test_extreme_log_ratios_leave_the_report_finite(r):
    found = report(by_log_ratios([[r] * 100, [0.0]]))
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("lengths", [[], [0], [2, 0]])
def test_batches_without_a_counting_token_have_a_report_of_zeros(lengths):
    n = sum(lengths)
    batch = TokenBatch.packed(torch.ones(n), torch.zeros(n), lengths, torch.zeros(n))
    found = report(batch)
    assert len(found) == 2 * len(NAMES) and not any(found.values())
