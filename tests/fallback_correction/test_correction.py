import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.config import CorrectionConfig, RejectionRule, Veto
from fallback_correction.correction import correct
from fallback_correction.tokens import TokenBatch
from tests.support.token_batches import batches, by_log_ratios, on_ranks, select, spread_batches

LEVELS = ["token", "sequence", "geometric"]
LOG2 = math.log(2)
NAN, INF = math.nan, math.inf

BATCH = by_log_ratios([[LOG2, 0.0], [-LOG2, 9.0], [9.0]], [[1, 1], [1, 0], [0]])
"""Ratios 2 and 1, 1/2, and a sequence that is masked altogether."""

# 2 is above this and the other ratios are below.
RULE = RejectionRule(upper=1.5)
SEQUENCE_RULE = RejectionRule(aggregation="sum", upper=1.5)


def exp(x):
    return torch.tensor(x).exp().item()


@st.composite
def configs(draw):
    statistics = st.sampled_from(["ratio", "k1", "k2", "k3"])
    aggregations = st.sampled_from(["token", "sum", "mean", "max"])
    rules = draw(st.lists(st.tuples(statistics, aggregations), max_size=2))
    return CorrectionConfig(
        mode=draw(st.sampled_from(["truncate", "clip", "mask"])),
        lower=0.25,
        upper=draw(st.sampled_from([2.0, INF])),
        rules=tuple(RejectionRule(statistic=s, aggregation=a, upper=1.1) for s, a in rules),
        veto=draw(st.sampled_from([None, Veto(lower=1e-4, upper=1e4)])),
        self_normalize=True,
    )


@pytest.mark.parametrize("level", LEVELS)
@given(spread_batches(), configs(), st.booleans())
def test_self_normalised_weights_have_the_same_bits_in_any_order_and_split(
    level, case, config, rejected_in_denominator
):
    config = replace(config, level=level, rejected_in_denominator=rejected_in_denominator)
    batch, parts = case
    whole = correct(batch, config)
    corrections = on_ranks(
        [part for part, _ in parts], lambda part, gather: correct(part, config, gather)
    )
    for correction, (_, index) in zip(corrections, parts, strict=True):
        assert torch.equal(correction.weights, whole.weights[index])
        assert torch.equal(correction.mask, whole.mask[index])
        assert correction.metrics == whole.metrics


@given(batches(), st.sampled_from(LEVELS))
def test_padding_changes_no_bit(batch, level):
    config = CorrectionConfig(level=level, self_normalize=True, rules=(SEQUENCE_RULE,))
    rows = [select(batch, [i])[0] for i in range(len(batch.lengths))]

    def pad(tensors):
        rows = [torch.nn.functional.pad(t, (0, 7 - len(t))) for t in tensors]
        return torch.stack(rows) if rows else torch.empty(0, 7)

    padded = TokenBatch.padded(
        pad([row.train_log_probs for row in rows]),
        pad([row.rollout_log_probs for row in rows]),
        pad([row.mask for row in rows]),
    )
    packed = correct(batch, config)
    correction = correct(padded, config)
    assert torch.equal(correction.weights[padded.mask], packed.weights[batch.mask])
    assert torch.equal(correction.mask[padded.mask], packed.mask[batch.mask])
    assert correction.metrics == packed.metrics


@pytest.mark.parametrize(
    ("level", "config", "mean", "weights"),
    [
        ("token", {}, 3.5 / 3, [2, 1, 0.5]),
        ("token", {"rules": (RULE,)}, 1.5 / 2, [0, 1, 0.5]),
        ("token", {"mode": "mask", "upper": 1.5}, 1.5 / 2, [0, 1, 0.5]),
        ("token", {"mode": "mask", "lower": 0.75}, 3 / 2, [2, 1, 0]),
        ("token", {"veto": Veto(lower=0.75)}, 3 / 2, [2, 1, 0]),
        ("sequence", {}, 1.25, [2, 2, 0.5]),
        ("sequence", {"rules": (RULE,)}, 1.25, [0, 2, 0.5]),
        ("sequence", {"rules": (SEQUENCE_RULE,)}, 0.5, [0, 0, 0.5]),
        ("sequence", {"mode": "mask", "upper": 1.5}, 0.5, [0, 0, 0.5]),
        ("geometric", {}, (2**0.5 + 0.5) / 2, [2**0.5, 2**0.5, 0.5]),
        ("geometric", {"rules": (SEQUENCE_RULE,)}, 0.5, [0, 0, 0.5]),
        ("geometric", {"veto": Veto(upper=1.5)}, 0.5, [0, 0, 0.5]),
    ],
)
@pytest.mark.parametrize("rejected_in_denominator", [True, False])
def test_self_normalisation_divides_by_the_mean_of_tokens_or_sequences_that_are_left(
    level, config, mean, weights, rejected_in_denominator
):
    config = CorrectionConfig(
        level=level,
        self_normalize=True,
        rejected_in_denominator=rejected_in_denominator,
        **{"upper": 10, **config},
    )
    correction = correct(BATCH, config)
    assert correction.metrics["correction/batch_norm_factor"] == pytest.approx(mean)
    expected = [w / mean for w in weights] + [0, 0]
    assert correction.weights.tolist() == pytest.approx(expected)


@given(batches(), configs(), st.sampled_from(LEVELS), st.booleans())
def test_self_normalised_weights_have_mean_one_over_what_is_left(batch, config, level, counted):
    config = replace(config, level=level, rejected_in_denominator=counted)
    correction = correct(batch, config)
    left = replace(batch, mask=correction.mask)
    assert not correction.weights[~correction.mask].any()
    assert torch.equal(correction.counted, batch.mask if counted else correction.mask)
    if correction.mask.any() and correction.metrics["correction/batch_norm_factor"] > 1e-8:
        per_sequence = left.means(correction.weights)[left.counts > 0]
        means = correction.weights[left.mask] if level == "token" else per_sequence
        assert means.double().mean().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("r", [-40.0, -18.5])
def test_weights_with_a_vanishing_mean_are_not_normalised(r):
    batch = by_log_ratios([[r]])
    normalised = correct(batch, CorrectionConfig(level="token", self_normalize=True))
    plain = correct(batch, CorrectionConfig(level="token"))
    assert torch.equal(normalised.weights, plain.weights)


def test_all_rules_must_keep_a_token_and_each_sees_the_whole_batch():
    # Without the token that the first rule rejects, the second would keep the sequence.
    batch = by_log_ratios([[2.0, 0.0, -0.5], [0.5]])
    rules = (RejectionRule(upper=exp(1.0)), SEQUENCE_RULE)
    for order in (rules, rules[::-1]):
        assert not correct(batch, CorrectionConfig(rules=order)).mask[:3].any()
    assert correct(batch, CorrectionConfig(rules=rules[:1])).mask.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("veto", [Veto(lower=0.75), Veto(by="rollout_probability", upper=0.5)])
def test_a_veto_takes_the_sequence_at_every_level(level, veto):
    rollout = torch.tensor([-1.0, -1.0, -1.0, -0.1])
    train = rollout + torch.tensor([0.0, 0.0, 0.5, -LOG2])
    batch = TokenBatch.packed(train, rollout, [2, 2])
    correction = correct(batch, CorrectionConfig(level=level, veto=veto))
    assert correction.mask.tolist() == [True, True, False, False]
    assert correction.metrics["correction/veto_token_fraction"] == 0.25
    assert correction.metrics["correction/veto_sequence_fraction"] == 0.5
    if level != "none":
        assert correction.weights.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(("mode", "after"), [("truncate", 2.141754), ("mask", 0.475087 * 3 / 2)])
def test_the_mean_weight_is_told_before_and_after_its_bounds(mode, after):
    """With the numbers of NeMo-RL's pull request 3900, where it was told after them alone. Their mean
    counts a masked token as 0; ours is that of the two tokens that are kept."""
    batch = by_log_ratios([[-0.5, 2.5, -0.2]], [[1, 1, 1]])
    metrics = correct(
        batch, CorrectionConfig(level="token", mode=mode, lower=0.5, upper=5.0)
    ).metrics
    assert metrics["correction/weight_mean_before"] == pytest.approx(4.535918, abs=1e-6)
    assert metrics["correction/weight_mean"] == pytest.approx(after, abs=1e-6)


METRICS = {
    "nonfinite_fraction": 0.0, "weight_mean_before": 3.5 / 3, "weight_max_before": 2.0,
    "weight_min_before": 0.5, "batch_norm_factor": 1.0,
}  # fmt: skip


def of_weights(mean, largest, smallest, rejected):
    names = ("weight_mean", "weight_max", "weight_min", "rejected_fraction")
    return dict(zip(names, (mean, largest, smallest, rejected), strict=True))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"upper": 1.5}, {"truncated_fraction": 1 / 3, **of_weights(1.0, 1.5, 0.5, 0.0)}),
        (
            {"mode": "clip", "lower": 0.75, "upper": 1.5},
            {
                "clipped_low_fraction": 1 / 3, "clipped_high_fraction": 1 / 3,
                **of_weights(3.25 / 3, 1.5, 0.75, 0.0),
            },
        ),
        (
            {"mode": "mask", "lower": 0.75, "upper": 2.5},
            {
                "masked_low_fraction": 1 / 3, "masked_high_fraction": 0.0,
                **of_weights(1.5, 2.0, 1.0, 1 / 3),
            },
        ),
        (
            {"rules": (RULE, RejectionRule(lower=0.75)), "veto": Veto(lower=0.75), "upper": 9},
            {
                "truncated_fraction": 0.0, "rejected_low_fraction": 1 / 3,
                "rejected_high_fraction": 1 / 3, "veto_token_fraction": 1 / 3,
                "veto_sequence_fraction": 1 / 2, **of_weights(1.0, 1.0, 1.0, 2 / 3),
            },
        ),
    ],
)  # fmt: skip
def test_every_metric_exactly(config, expected):
    metrics = correct(BATCH, CorrectionConfig(level="token", **config)).metrics
    expected = {f"correction/{k}": pytest.approx(v) for k, v in (METRICS | expected).items()}
    assert metrics == expected


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["train_log_probs", "rollout_log_probs"])
def test_a_nonfinite_log_prob_stops_and_is_named(side, value):
    log_probs = {name: torch.zeros(4) for name in ("train_log_probs", "rollout_log_probs")}
    log_probs[side][2] = value
    batch = TokenBatch.packed(*log_probs.values(), [2, 0, 2])
    named = rf"{side[:-1]}={value}.* at token 2 \(sequence 2\), one of 1"
    with pytest.raises(ValueError, match=named):
        correct(batch, CorrectionConfig())


SEES_SEQUENCES = [
    {"level": "sequence"},
    {"level": "geometric"},
    {"veto": Veto()},
    {"level": "token", "veto": Veto()},
    {"rules": (RejectionRule(), RejectionRule(aggregation="mean"))},
]
SEES_TOKENS = [{}, {"level": "token"}, {"level": "token", "rules": (RULE,)}]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("config", SEES_SEQUENCES + SEES_TOKENS)
def test_a_rejected_nonfinite_token_takes_its_sequence_along_if_sequences_matter(config, value):
    batch = by_log_ratios([[0.0, value], [0.0], [value, 0.0]], [[1, 1], [1], [0, 1]])
    correction = correct(batch, CorrectionConfig(nonfinite="reject", **config))
    first = config in SEES_TOKENS
    assert correction.mask.tolist() == [first, False, True, False, True]
    assert correction.metrics["correction/nonfinite_fraction"] == (0.25 if first else 0.5)
    if correction.weights is not None:
        assert correction.weights.tolist() == [first, 0, 1, 0, 1]


@pytest.mark.parametrize("level", LEVELS)
def test_rejected_nonfinite_tokens_are_in_no_mean(level):
    with_nan = by_log_ratios([[LOG2], [-LOG2], [NAN]])
    without = by_log_ratios([[LOG2], [-LOG2]])
    config = CorrectionConfig(level=level, self_normalize=True, nonfinite="reject")
    weights = correct(with_nan, config).weights
    assert torch.equal(weights[:2], correct(without, config).weights)
    assert weights[2] == 0


def test_masked_nonfinite_tokens_are_no_error():
    batch = by_log_ratios([[0.0, NAN], [INF]], [[1, 0], [0]])
    config = CorrectionConfig(level="sequence", self_normalize=True, veto=Veto(lower=0.5))
    assert correct(batch, config).weights.tolist() == [1, 0, 0]


@pytest.mark.parametrize("level", ["none", *LEVELS])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2]])
def test_batches_without_a_counting_token_come_through(level, mode, lengths):
    n = sum(lengths)
    batch = TokenBatch.packed(torch.ones(n), torch.zeros(n), lengths, torch.zeros(n))
    config = CorrectionConfig(
        level=level, mode=mode, lower=0.5, self_normalize=True,
        rules=(RULE, SEQUENCE_RULE), veto=Veto(lower=0.5), rejected_in_denominator=False,
    )  # fmt: skip
    correction = correct(batch, config)
    assert not correction.mask.any() and len(correction.mask) == n
    assert all(math.isfinite(value) for value in correction.metrics.values())
    if level != "none":
        assert torch.equal(correction.weights, torch.zeros(n))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("r", [40.0, -40.0])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_extreme_log_ratios_give_finite_weights_and_metrics(level, r, mode):
    batch = by_log_ratios([[r] * 50, [0.0], [-r, r]])
    config = CorrectionConfig(
        level=level, mode=mode, lower=0.5, upper=INF, self_normalize=True, veto=Veto()
    )
    correction = correct(batch, config)
    assert correction.weights.isfinite().all()
    assert all(math.isfinite(value) for value in correction.metrics.values())


@pytest.mark.parametrize("mode", ["truncate", "clip"])
@pytest.mark.parametrize("self_normalize", [False, True])
def test_a_weight_beyond_float32_stops_and_is_named_and_no_metric_is_infinite(mode, self_normalize):
    """They were infinite, and NaN over an infinite mean."""
    batch = by_log_ratios([[0.0, 89.0], [100.0]])
    config = CorrectionConfig(
        level="token", mode=mode, upper=INF, log_ratio_clamp=None, self_normalize=self_normalize
    )
    with pytest.raises(
        ValueError, match=r"log_ratio_clamp=None, upper=inf: token 1, one of 2,.*Give"
    ):
        correct(batch, config)
    bounded = correct(batch, replace(config, upper=2.0))
    assert bounded.weights.isfinite().all()
    assert all(math.isfinite(value) for value in bounded.metrics.values())
    assert bounded.metrics[f"correction/{BEYOND[mode]}"] == pytest.approx(2 / 3)


BEYOND = {"truncate": "truncated_fraction", "clip": "clipped_high_fraction"}


def test_a_weight_beyond_float32_that_is_rejected_is_no_error():
    config = CorrectionConfig(
        level="token", mode="mask", upper=2.0, log_ratio_clamp=None, self_normalize=True
    )
    correction = correct(by_log_ratios([[0.0, 89.0]]), config)
    assert correction.weights.tolist() == [1, 0]
    assert all(math.isfinite(value) for value in correction.metrics.values())


@given(batches(), configs())
def test_levels_agree_to_the_bit_on_one_token_sequences(batch, config):
    batch = TokenBatch.packed(
        batch.train_log_probs, batch.rollout_log_probs, [1] * len(batch.mask), batch.mask
    )
    token, *others = (correct(batch, replace(config, level=level)) for level in LEVELS)
    for other in others:
        assert torch.equal(token.weights, other.weights)
        assert token.metrics == other.metrics


def test_nothing_of_a_correction_has_a_gradient():
    log_probs = torch.zeros(2, requires_grad=True)
    batch = TokenBatch(
        train_log_probs=log_probs,
        rollout_log_probs=log_probs - 0.1,
        mask=torch.ones(2, dtype=torch.bool),
        lengths=torch.tensor([2]),
    )
    correction = correct(batch, CorrectionConfig(level="token", self_normalize=True))
    assert not correction.weights.requires_grad


def test_without_any_option_nothing_is_corrected():
    correction = correct(BATCH, CorrectionConfig())
    assert correction.weights is None
    assert torch.equal(correction.mask, BATCH.mask)
    assert correction.metrics == {
        "correction/nonfinite_fraction": 0.0,
        "correction/rejected_fraction": 0.0,
    }
