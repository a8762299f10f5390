import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.config import CorrectionConfig, CorrectionSettings
from fallback_correction.correction import correct, importance_weights
from fallback_correction.effective_rate import rate_factor, weight_sums
from fallback_correction.tokens import TokenBatch, log_ratios
from tests.support.token_batches import by_log_ratios, spread_batches

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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "prefix-min"])
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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", "prefix-min"])
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


TURNS = [[0.5, -1.0, 0.25], [2.0], [-0.25, 0.75], [1.0]]
"""Log-ratios of four turns: the first sequence has three, the second one."""


def batch_of_turns(mask=None):
    flat = torch.tensor([r for turn in TURNS for r in turn])
    lengths, turns = [6, 1], [*map(len, TURNS)]
    return TokenBatch.packed(flat, torch.zeros_like(flat), lengths, mask, turns)


@pytest.mark.parametrize(("level", "mean"), [("turn", False), ("turn-geometric", True)])
def test_a_turns_weight_is_the_product_or_the_geometric_mean_over_it(level, mean):
    """In float64, from the definition."""
    sums = [math.fsum(turn) / (len(turn) if mean else 1) for turn in TURNS]
    expected = [math.exp(x) for x, turn in zip(sums, TURNS, strict=True) for _ in turn]
    found = weights_of(batch_of_turns(), level=level, upper=100.0).bounded
    assert found.tolist() == pytest.approx(expected)
    whole = {"turn": "sequence", "turn-geometric": "geometric"}[level]
    over_sequences = weights_of(batch_of_turns(), level=whole, upper=100.0).bounded
    assert found[-1] == over_sequences[-1] and not torch.equal(found, over_sequences)
    # Without turns a sequence is one.
    alone = dataclasses.replace(batch_of_turns(), turns=None)
    assert torch.equal(weights_of(alone, level=level, upper=100.0).bounded, over_sequences)


@pytest.mark.parametrize("level", ["turn", "turn-geometric"])
def test_a_turn_is_rejected_whole_and_leaves_the_other_turns_of_its_sequence(level):
    settings = CorrectionSettings(use_rs=True, rs_level=level, rs_upper_bound=5.0)
    kept = correct(batch_of_turns(), settings.correction()).mask
    assert kept.tolist() == [True] * 3 + [False] + [True] * 3


def test_weights_are_normalised_by_their_mean_over_turns():
    config = CorrectionConfig(level="turn", upper=100.0, self_normalize=True)
    found = correct(batch_of_turns(), config)
    mean = math.fsum(math.exp(math.fsum(turn)) for turn in TURNS) / 4
    assert found.metrics["correction/batch_norm_factor"] == pytest.approx(mean)


def test_turns_that_do_not_end_with_their_sequences_are_refused():
    for turns in ([3, 1, 3], [3, 1, 2], [3, 1, 2, 2]):
        with pytest.raises(ValueError, match="turns end with their sequences"):
            TokenBatch.packed(torch.zeros(7), torch.zeros(7), [6, 1], None, turns)


def minpro(rows, masks):
    """rho_t times the smallest rho_i of the tokens that count, i < t, in float64 (arXiv 2601.22718)."""
    found = []
    for row, mask in zip(rows, masks, strict=True):
        before = []
        for r, counts in zip(row, mask, strict=True):
            found.append(math.exp(r) * min(before, default=1.0) if counts else 0.0)
            before += [math.exp(r)] if counts else []
    return found


# The third is a tool's token, which no policy drew; radixark/miles#3097 counts such tokens out too.
PREFIXES = [[0.5, -1.0, -3.0, 0.25, -0.5], [0.75, 0.5], [-2.0], []]
COUNTING = [[1, 1, 0, 1, 1], [1, 1], [1], []]


def test_minpro_weighs_a_token_by_its_ratio_and_the_smallest_before_it():
    batch = by_log_ratios(PREFIXES, COUNTING)
    found = weights_of(batch, level="prefix-min", upper=100.0).bounded.tolist()
    assert found == pytest.approx(minpro(PREFIXES, COUNTING))
    # The first token has its own ratio, the second may be above both: the prefix is above 1 as well.
    assert found[5:7] == pytest.approx([math.exp(0.75), math.exp(1.25)])
    assert found[:2] == pytest.approx([math.exp(0.5), math.exp(-0.5)])
    # With the token's own ratio among those before it, or with the masked one, other weights come out.
    assert found[1] != pytest.approx(math.exp(-2)) and found[3] == pytest.approx(math.exp(-0.75))
    clipped = weights_of(batch, level="prefix-min", mode="clip", lower=0.8, upper=1.28).bounded
    wanted = [min(max(w, 0.8), 1.28) if w else 0.0 for w in minpro(PREFIXES, COUNTING)]
    assert clipped.tolist() == pytest.approx(wanted)


@given(spread_batches())
def test_minpro_is_its_formula_and_its_bits_depend_on_no_other_sequence(spread):
    batch, parts = spread
    config = {"level": "prefix-min", "upper": INF, "log_ratio_clamp": None}
    found = weights_of(batch, **config).raw
    rows = [x.double().tolist() for x in log_ratios(batch).split(batch.lengths.tolist())]
    masks = [x.tolist() for x in batch.mask.split(batch.lengths.tolist())]
    wanted = torch.tensor(minpro(rows, masks), dtype=torch.float64)
    assert torch.allclose(found.double(), wanted, rtol=1e-4)
    for part, index in parts:
        assert torch.equal(weights_of(part, **config).raw, found[index])


@given(st.lists(st.floats(-1, 0, width=32), min_size=1, max_size=12))
def test_where_ratios_are_below_1_minpro_lies_between_the_token_and_its_whole_prefix(row):
    batch = by_log_ratios([row])
    found = weights_of(batch, level="prefix-min", log_ratio_clamp=None).raw.double()
    product = torch.tensor(row, dtype=torch.float64).cumsum(0).exp()
    token = torch.tensor(row, dtype=torch.float64).exp()
    assert (found <= token * (1 + 1e-6)).all() and (found >= product * (1 - 1e-6)).all()


def test_a_long_sequence_that_drifts_by_little_keeps_minpros_weights_near_1():
    """NVIDIA-NeMo/RL#2269: token ratios of 0.9999 whose product over 9,000 tokens was 0.06."""
    generator = torch.Generator().manual_seed(0)
    r = -3.1e-4 + 1e-3 * torch.randn(9000, generator=generator)
    batch = by_log_ratios([r.tolist()])
    assert weights_of(batch, level="sequence").bounded.max() < 0.08
    assert weights_of(batch, level="prefix-min").bounded.min() > 0.99


def test_minpros_weights_are_normalised_and_counted_token_by_token():
    batch = by_log_ratios(PREFIXES, COUNTING)
    config = CorrectionConfig(level="prefix-min", upper=100.0, self_normalize=True)
    found = correct(batch, config)
    weights = [w for w in minpro(PREFIXES, COUNTING) if w]
    assert found.metrics["correction/batch_norm_factor"] == pytest.approx(math.fsum(weights) / 7)
    sums = weight_sums(batch, found.weights, "prefix-min")
    share = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights) / 7
    assert rate_factor(*map(float, sums)) == pytest.approx(math.sqrt(share))
    assert config.looks_at_sequences and not CorrectionConfig(level="token").looks_at_sequences


def test_minpro_is_a_weight_and_no_metric_of_rejection():
    with pytest.raises(ValueError, match="rs_level='prefix-min': unknown"):
        CorrectionSettings(use_rs=True, rs_level="prefix-min")
