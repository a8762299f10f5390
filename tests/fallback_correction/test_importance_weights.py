import math

import pytest
import torch

from fallback_correction.config import CorrectionConfig
from fallback_correction.correction import correct, importance_weights
from fallback_correction.tokens import log_ratios
from tests.support.token_batches import by_log_ratios

LOG2 = math.log(2)
INF = math.inf


def weights_of(batch, **config):
    return importance_weights(batch, log_ratios(batch), CorrectionConfig(**config))


def exp(x):
    """exp in float32, whose bits a bound may then equal."""
    return torch.tensor(x).exp().item()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2, 0.5, 4, 0.25]),
        ("sequence", [4, 4, 4, 0.25]),
        ("geometric", [4 ** (1 / 3)] * 3 + [0.25]),
    ],
)
def test_a_weight_is_the_ratio_the_product_or_the_geometric_mean(level, expected):
    batch = by_log_ratios([[LOG2, -LOG2, 2 * LOG2], [-2 * LOG2]])
    assert weights_of(batch, level=level, upper=10).bounded.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_masked_tokens_weigh_nothing_and_enter_no_sequence(level):
    batch = by_log_ratios([[LOG2, 9.0], [9.0]], [[1, 0], [0]])
    weights = weights_of(batch, level=level, mode="clip", lower=0.5)
    assert weights.bounded.tolist() == weights.raw.tolist() == [pytest.approx(2), 0, 0]
    assert not weights.too_low.any() and not weights.too_high.any()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("truncate", [exp(-2.0), exp(-1.0), 1, exp(1.0), exp(1.0)]),
        ("clip", [exp(-1.0), exp(-1.0), 1, exp(1.0), exp(1.0)]),
        ("mask", [exp(-2.0), exp(-1.0), 1, exp(1.0), exp(2.0)]),
    ],
)
def test_modes_bound_the_weights_and_a_weight_equal_to_a_bound_is_inside(mode, expected):
    batch = by_log_ratios([[-2, -1, 0, 1, 2]])
    weights = weights_of(batch, level="token", mode=mode, lower=exp(-1.0), upper=exp(1.0))
    assert weights.bounded.tolist() == expected
    assert weights.too_low.tolist() == [True, False, False, False, False]
    assert weights.too_high.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(
    ("r", "clamp", "raw"),
    [
        (40.0, 20.0, exp(20.0)), (-40.0, 20.0, exp(-20.0)), (40.0, None, exp(40.0)),
        (-40.0, None, exp(-40.0)), (20.0, 20.0, exp(20.0)), (200.0, None, INF),
        (-200.0, None, 0.0),
    ],
)  # fmt: skip
def test_extreme_log_ratios_are_cut_before_exp(level, r, clamp, raw):
    batch = by_log_ratios([[r]])
    assert weights_of(batch, level=level, log_ratio_clamp=clamp).raw.tolist() == [raw]
    bounded = weights_of(batch, level=level, log_ratio_clamp=clamp).bounded
    assert bounded.tolist() == [min(raw, 2.0)]


def test_the_product_is_cut_and_not_its_factors():
    batch = by_log_ratios([[40, -40, 1]])
    assert weights_of(batch, level="sequence", upper=INF).raw.tolist() == [exp(1.0)] * 3


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 0, 7]])
def test_identical_engines_give_weights_of_exactly_one(level, lengths):
    batch = by_log_ratios([[0.0] * n for n in lengths])
    assert weights_of(batch, level=level).bounded.tolist() == [1.0] * sum(lengths)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lower", -0.1, r"must be at least 0"),
        ("lower", 3.0, r"the lower bound must not exceed the upper one"),
        ("upper", math.nan, r"the lower bound must not exceed the upper one"),
        ("log_ratio_clamp", 0.0, r"must be greater than 0"),
        ("log_ratio_clamp", math.nan, r"must be greater than 0"),
    ],
)
def test_impossible_bounds_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**{field: value})


def test_topr_truncates_only_what_has_a_negative_advantage():
    """Of each sequence clip(product of the ratios, 0, 1) where its advantage is negative, else 1, as in
    arXiv 2503.14286."""
    rows = [[0.5, -1.0], [0.5, 0.25], [0.5, 0.25], [-0.5]]
    advantages = torch.tensor([-1.0, -1.0, -2.0, -2.0, 2.0, 2.0, 0.0])
    batch = by_log_ratios(rows)
    config = CorrectionConfig(level="sequence", mode="taper", upper=1.0)
    found = correct(batch, config, advantages=advantages)
    expected = [math.exp(-0.5)] * 2 + [1.0] * 5
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.metrics["correction/truncated_fraction"] == 2 / 7
    assert correct(batch, config, advantages=-advantages).weights.tolist() != found.weights.tolist()
    with pytest.raises(ValueError, match="mode=taper: needs the advantages"):
        correct(batch, config)
