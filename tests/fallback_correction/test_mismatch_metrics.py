import math
import statistics

import pytest
import torch
from hypothesis import given

from fallback_correction.mismatch_metrics import mismatch_metrics
from fallback_correction.tokens import TokenBatch
from tests.support.token_batches import batches, by_log_ratios, on_ranks, spread_batches

NAN, INF = math.nan, math.inf


def exp(*values):
    return [math.exp(x) for x in values]


def mean(*values):
    return math.fsum(values) / len(values)


def test_every_metric_exactly():
    # r = 1/2, 0 | -1 | two masked tokens; halves and quarters, so that float32 is exact.
    train = torch.tensor([-0.5, -1.5, -2.0, -9.0, NAN])
    rollout = torch.tensor([-1.0, -1.5, -1.0, -1.0, 0.0])
    batch = TokenBatch.packed(train, rollout, [2, 2, 1, 0], torch.tensor([1, 1, 1, 0, 0]))
    w = exp(0.5, 0, -1)
    p, q = exp(-0.5, -1.5, -2), exp(-1, -1.5, -1)
    difference = [abs(a - b) for a, b in zip(p, q, strict=True)]
    expected = {
        "nonfinite_fraction": 0, "clamped_fraction": 0, "k1": 0.5 / 3,
        "k3": mean(w[0] - 1.5, 0, w[2]), "abs_diff": 0.5,
        "tv": mean((w[0] - 1) / 2, 0, (1 - w[2]) / 2),
        "chi2_token": mean(math.e - 1, 0, math.exp(-2) - 1),
        "ess": sum(w) ** 2 / (3 * sum(x * x for x in w)), "train_log_ppl": mean(1.0, 2.0),
        "rollout_log_ppl": mean(1.25, 1.0), "log_ppl_diff": mean(-0.25, 1.0),
        "log_ppl_abs_diff": mean(0.25, 1.0), "log_ppl_abs_diff_sum": mean(0.5, 1.0),
        "chi2_sequence": mean(math.e - 1, math.exp(-2) - 1), "prob_diff_mean": mean(*difference),
        "prob_diff_max": max(difference), "prob_diff_std": statistics.pstdev(difference),
        "prob_pearson": statistics.correlation(p, q),
    }  # fmt: skip
    expected = {f"mismatch/{k}": pytest.approx(v, rel=1e-12) for k, v in expected.items()}
    assert mismatch_metrics(batch) == expected


ZERO = {
    "nonfinite_fraction", "clamped_fraction", "k1", "k3", "abs_diff", "tv", "chi2_token",
    "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_abs_diff_sum", "chi2_sequence",
    "prob_diff_mean", "prob_diff_max", "prob_diff_std",
}  # fmt: skip


@given(batches())
def test_identical_engines_are_no_distance_apart(batch):
    log_probs = batch.rollout_log_probs
    batch = TokenBatch.packed(log_probs, log_probs, batch.lengths.tolist(), batch.mask)
    metrics = mismatch_metrics(batch)
    assert {name for name in ZERO if metrics[f"mismatch/{name}"] != 0} == set()
    assert metrics["mismatch/ess"] == metrics["mismatch/prob_pearson"] == 1
    assert metrics["mismatch/train_log_ppl"] == metrics["mismatch/rollout_log_ppl"] >= 0


@given(spread_batches())
def test_metrics_have_the_same_bits_in_any_order_and_split(case):
    batch, parts = case
    whole = mismatch_metrics(batch)
    assert on_ranks([part for part, _ in parts], mismatch_metrics) == [whole] * len(parts)


def test_the_clamped_fraction_counts_log_ratios_beyond_20():
    batch = by_log_ratios([[20.0, -20.0, 20.5], [-40.0, 0.0, 40.0]], [[1, 1, 1], [1, 1, 0]])
    assert mismatch_metrics(batch)["mismatch/clamped_fraction"] == 2 / 5


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_tokens_that_are_not_finite_are_counted_and_left_out(value):
    batch = by_log_ratios([[0.5, value], [-0.25], [value]])
    metrics = mismatch_metrics(batch)
    assert metrics.pop("mismatch/nonfinite_fraction") == 0.5
    rest = mismatch_metrics(by_log_ratios([[0.5], [-0.25]]))
    assert metrics.items() <= rest.items() and len(metrics) == len(rest) - 1


@pytest.mark.parametrize("r", [40.0, -40.0, -1e30])
@pytest.mark.parametrize("length", [1, 100])
def test_extreme_log_ratios_leave_every_metric_finite(r, length):
    both = TokenBatch.packed(
        torch.tensor([min(r, 0.0)] * length + [0.0]),
        torch.tensor([-max(r, 0.0)] * length + [-1.0]),
        [length, 1],
    )
    metrics = mismatch_metrics(both)
    assert {k: v for k, v in metrics.items() if not math.isfinite(v)} == {}


@pytest.mark.parametrize("lengths", [[], [0], [2, 0, 1]])
def test_batches_without_a_counting_token_have_metrics(lengths):
    n = sum(lengths)
    metrics = mismatch_metrics(
        TokenBatch.packed(torch.ones(n), torch.zeros(n), lengths, torch.zeros(n))
    )
    ones = {"mismatch/ess", "mismatch/prob_pearson"}
    assert metrics == {name: float(name in ones) for name in metrics}


def test_k3_of_a_small_mismatch_keeps_its_digits():
    r = 2.0**-20
    k3 = mismatch_metrics(by_log_ratios([[r]]))["mismatch/k3"]
    assert k3 == pytest.approx(r * r / 2 + r**3 / 6, rel=1e-3)


@given(batches())
def test_metrics_lie_where_they_must(batch):
    metrics = mismatch_metrics(batch)
    assert metrics["mismatch/k3"] >= 0 and metrics["mismatch/tv"] >= 0
    assert 0 < metrics["mismatch/ess"] <= 1 + 1e-12
    assert abs(metrics["mismatch/prob_pearson"]) <= 1 + 1e-9
