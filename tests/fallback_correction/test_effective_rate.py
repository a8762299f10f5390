"""The learning rate by the effective sample size: the formula in float64, whatever holds which part."""

import math

import pytest
import torch

from fallback_correction.effective_rate import rate_factor, weight_sums
from fallback_correction.tokens import TokenBatch

WEIGHTS = [[1.0, 1.5, 0.0], [0.25], [2.0, 2.0]]


def batch_of(rows, mask=None):
    flat = torch.zeros(sum(map(len, rows)))
    return TokenBatch.packed(flat, flat, [*map(len, rows)], mask)


def factor_of(rows, level, mask=None):
    flat = torch.tensor([w for row in rows for w in row])
    return rate_factor(*(float(x) for x in weight_sums(batch_of(rows, mask), flat, level)))


def reference(weights):
    total, squares = math.fsum(weights), math.fsum(w * w for w in weights)
    return math.sqrt(total**2 / squares / len(weights))


def test_it_is_the_root_of_the_effective_share_of_the_weights():
    flat = [w for row in WEIGHTS for w in row]
    assert factor_of(WEIGHTS, "token") == pytest.approx(reference(flat), rel=1e-12)
    means = [math.fsum(row) / len(row) for row in WEIGHTS]
    for level in ("sequence", "geometric"):
        assert factor_of(WEIGHTS, level) == pytest.approx(reference(means), rel=1e-12)
    assert reference(flat) < 0.85


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_weights_leave_the_rate_as_it_is_to_the_bit(level):
    assert factor_of([[0.7] * 3, [0.7]], level) == 1.0
    assert factor_of([[0.7] * 3, [0.8]], level) < 1.0


def test_one_weight_among_n_leaves_the_root_of_a_nth_and_none_leaves_nothing():
    assert factor_of([[3.0], [0.0], [0.0], [0.0]], "token") == 0.5
    assert factor_of([[0.0], [0.0]], "token") == 0.0


def test_masked_tokens_and_empty_parts_count_nothing():
    mask = torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool)
    assert factor_of(WEIGHTS, "token", mask) == factor_of([[1.0, 1.5], [2.0, 2.0]], "token")
    nothing = torch.zeros(6, dtype=torch.bool)
    assert factor_of(WEIGHTS, "sequence", nothing) == 1.0  # a filler alone
    parts = [weight_sums(batch_of([row]), torch.tensor(row), "token") for row in WEIGHTS]
    sums = [float(sum(column)) for column in zip(*parts, strict=True)]
    assert rate_factor(*sums) == factor_of(WEIGHTS, "token")
