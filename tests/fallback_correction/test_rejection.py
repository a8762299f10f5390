import dataclasses
import math

import pytest
import torch

from fallback_correction.adapters import verl
from fallback_correction.config import CorrectionSettings, RejectionRule, Veto
from fallback_correction.config.correction_settings import METRICS
from fallback_correction.correction import apply_rule, apply_veto, binary_kl, correct, divergence
from fallback_correction.ranges import FieldError
from fallback_correction.score_centering import likeliest_kl
from fallback_correction.tokens import TokenBatch, log_ratios
from tests.support.token_batches import by_log_ratios

R = [[1.0, -2.0, 0.5], [0.25]]
INF = math.inf


def rejected(batch, limit=20.0, **rule):
    found = apply_rule(batch, log_ratios(batch), RejectionRule(**rule), limit)
    assert torch.equal(found.either, found.low | found.high)
    return found.low.int().tolist(), found.high.int().tolist()


def vetoed(batch, **veto):
    tokens, sequences = apply_veto(batch, log_ratios(batch), Veto(**veto))
    return tokens.int().tolist(), sequences.int().tolist()


def exp(x):
    return torch.tensor(x).exp().item()


def k2(x):
    return x * x / 2


def k3(x):
    return divergence(torch.tensor(x), "k3").item()


def of_tokens(f):
    return [[f(x) for x in sequence] for sequence in R]


# The values of the statistic that the bounds are compared with, token by token.
VALUES = {
    ("ratio", "token"): of_tokens(exp),
    ("ratio", "sum"): [[exp(-0.5)] * 3, [exp(0.25)]],
    ("ratio", "mean"): [[exp(-0.5 / 3)] * 3, [exp(0.25)]],
    ("ratio", "max"): [[exp(1.0)] * 3, [exp(0.25)]],
    ("k1", "token"): of_tokens(exp),
    ("k1", "sum"): [[exp(-0.5)] * 3, [exp(0.25)]],
    ("k1", "mean"): [[exp(-0.5 / 3)] * 3, [exp(0.25)]],
    ("k1", "max"): [[exp(-2.0)] * 3, [exp(0.25)]],
    ("k2", "token"): of_tokens(k2),
    ("k2", "sum"): [[2.625] * 3, [k2(0.25)]],
    ("k2", "mean"): [[0.875] * 3, [k2(0.25)]],
    ("k2", "max"): [[2.0] * 3, [k2(0.25)]],
    ("k3", "token"): of_tokens(k3),
    ("k3", "sum"): [[math.fsum(map(k3, R[0]))] * 3, [k3(0.25)]],
    ("k3", "mean"): [[math.fsum(map(k3, R[0])) / 3] * 3, [k3(0.25)]],
    ("k3", "max"): [[k3(-2.0)] * 3, [k3(0.25)]],
}


@pytest.mark.parametrize(("statistic", "aggregation"), VALUES)
def test_a_rule_keeps_what_lies_between_its_bounds_both_included(statistic, aggregation):
    batch = by_log_ratios(R)
    values = torch.tensor([v for sequence in VALUES[statistic, aggregation] for v in sequence])
    rule = {"statistic": statistic, "aggregation": aggregation}
    for bound in set(values.tolist()):
        below, above = (values < bound).int().tolist(), (values > bound).int().tolist()
        assert rejected(batch, **rule, lower=bound) == (below, [0] * 4)
        assert rejected(batch, **rule, upper=bound) == ([0] * 4, above)
        assert rejected(batch, **rule, lower=bound, upper=bound) == (below, above)
        # The smallest step beyond a value rejects it.
        beyond = torch.tensor(bound).nextafter(torch.tensor(INF)).item()
        assert rejected(batch, **rule, lower=beyond)[0] == (values <= bound).int().tolist()
        beyond = torch.tensor(bound).nextafter(torch.tensor(-INF)).item()
        assert rejected(batch, **rule, upper=beyond)[1] == (values >= bound).int().tolist()


def test_divergences_exactly():
    r = torch.tensor([0.5, 0.0, -2.0])
    assert divergence(r, "k1").tolist() == [-0.5, 0, 2]
    assert divergence(r, "k2").tolist() == [0.125, 0, 2]
    expected = [math.exp(0.5) - 1.5, 0, math.exp(-2) + 1]
    assert divergence(r, "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("statistic", "aggregation"), VALUES)
def test_masked_tokens_are_neither_rejected_nor_looked_at(statistic, aggregation):
    batch = by_log_ratios([[0.0, 9.0], [9.0, -9.0], []], [[1, 0], [0, 0], []])
    rule = {"statistic": statistic, "aggregation": aggregation}
    middle = 1.0 if statistic in ("ratio", "k1") else 0.0
    assert rejected(batch, **rule, lower=middle, upper=middle) == ([0] * 4, [0] * 4)
    assert rejected(by_log_ratios([]), **rule, lower=1, upper=1) == ([], [])


@pytest.mark.parametrize(("statistic", "aggregation"), VALUES)
def test_extreme_log_ratios_are_rejected_on_their_side(statistic, aggregation):
    batch = by_log_ratios([[40.0], [0.0], [-40.0]])
    rule = {"statistic": statistic, "aggregation": aggregation}
    if statistic in ("ratio", "k1"):
        assert rejected(batch, **rule, lower=0.5, upper=2) == ([0, 0, 1], [1, 0, 0])
    else:
        assert rejected(batch, **rule, upper=2) == ([0, 0, 0], [1, 0, 1])
    assert rejected(batch, None, **rule, lower=-INF) == ([0, 0, 0], [0, 0, 0])


def test_the_clamp_bounds_what_a_rule_sees():
    batch = by_log_ratios([[40.0]])
    assert rejected(batch, 20.0, upper=exp(20.0)) == ([0], [0])
    assert rejected(batch, None, upper=exp(20.0)) == ([0], [1])


@pytest.mark.parametrize("rule", [RejectionRule, Veto])
@pytest.mark.parametrize(("lower", "upper"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.nan)])
def test_impossible_bounds_are_refused(rule, lower, upper):
    with pytest.raises(ValueError, match=r"the lower bound must not exceed the upper one"):
        rule(lower=lower, upper=upper)


@pytest.mark.parametrize(
    ("veto", "tokens"),
    [
        ({"lower": exp(-1.0)}, [0, 1, 0, 0, 0]),
        ({"lower": exp(-2.0)}, [0, 0, 0, 0, 0]),  # a token at the bound is inside
        ({"upper": exp(1.0)}, [0, 0, 0, 1, 0]),
        ({"upper": exp(3.0)}, [0, 0, 0, 0, 0]),
        ({"lower": exp(-1.0), "upper": exp(1.0)}, [0, 1, 0, 1, 0]),
        ({}, [0, 0, 0, 0, 0]),
    ],
)
def test_a_veto_by_ratio_takes_the_whole_sequence(veto, tokens):
    batch = by_log_ratios([[0, -2], [0, 3], [0]])
    sequences = [int(x) for x in (tokens[1],) * 2 + (tokens[3],) * 2 + (0,)]
    assert vetoed(batch, **veto) == (tokens, sequences)


@pytest.mark.parametrize(
    ("veto", "tokens", "sequences"),
    [
        ({"lower": exp(-3.0)}, [0, 0, 0], [0, 0, 0]), ({"lower": exp(-2.0)}, [0, 1, 0], [1, 1, 0]),
        ({"upper": exp(-1.0)}, [0, 0, 0], [0, 0, 0]), ({"upper": exp(-2.0)}, [1, 0, 1], [1, 1, 1]),
    ],
)  # fmt: skip
def test_a_veto_by_rollout_probability_does_not_look_at_the_trainer(veto, tokens, sequences):
    rollout = torch.tensor([-1.0, -3.0, -1.0])
    for train in (rollout, torch.tensor([-9.0, 0.0, -5.0])):
        batch = TokenBatch.packed(train, rollout, [2, 1])
        assert vetoed(batch, by="rollout_probability", **veto) == (tokens, sequences)


@pytest.mark.parametrize("by", ["ratio", "rollout_probability"])
def test_a_veto_does_not_look_at_masked_tokens(by):
    log_probs = torch.tensor([0.0, -50.0, math.nan, -50.0])
    mask = torch.tensor([1, 0, 0, 0])
    for train, rollout in ((log_probs, torch.zeros(4)), (torch.zeros(4), log_probs)):
        batch = TokenBatch.packed(train, rollout, [3, 1], mask)
        assert vetoed(batch, by=by, lower=0.5, upper=1.5) == ([0] * 4, [0] * 4)


def test_a_veto_looks_at_ratios_before_the_clamp():
    batch = by_log_ratios([[-40.0], [-30.0]])
    assert vetoed(batch, lower=math.exp(-35)) == ([1, 0], [1, 0])


MATRIX = torch.tensor(
    [[0.9, -0.1, 0.05, 0.0], [0.3, 0.2, -0.25, 0.1], [-1.5, 0.4, 0.0, 0.6], [0.0, 0.01, -0.02, 0.0]]
)


def mask_of(*rules):
    settings = CorrectionSettings(use_rs=True, rs_rules=rules)
    rollout = torch.full_like(MATRIX, -2.0)
    batch = TokenBatch.padded(rollout + MATRIX, rollout, torch.ones_like(MATRIX))
    return correct(batch, settings.correction()).mask.view(MATRIX.shape)


def verls(names, thresholds):
    config = {"rollout_rs": names, "rollout_rs_threshold": thresholds}
    rollout = torch.full_like(MATRIX, -2.0)
    _, mask, _ = verl.compute_rollout_correction(
        config,
        old_log_prob=rollout + MATRIX,
        rollout_log_prob=rollout,
        response_mask=torch.ones_like(MATRIX),
    )
    return mask.bool()


@pytest.mark.parametrize("name", sorted(METRICS.keys() - {"seq_max_kl"}))  # which verl cannot know
def test_a_metric_keeps_what_verls_of_its_name_keeps(name):
    bound = "0.9_1.1111111" if name.endswith("k1") else "0.03"  # as much of rho as of 1 / rho
    theirs = name.removeprefix("token_") if name.endswith("kl") else name
    assert torch.equal(mask_of(f"{name}={bound}"), verls(theirs, bound))
    assert mask_of(f"{name}={bound}").any() and not mask_of(f"{name}={bound}").all()


BINARY = [(0.5, 0.5, 0), (0.9, 0.6, 0.3112387), (0.6, 0.9, 0.3112387), (1e-4, 1e-2, 0.0362009),
    (1.0, 0.5, 6.2146062), (0.02, 0.01, 0.0039136)]  # fmt: skip
"""(p, q, larger KL between a token and all others), from the definition in float64."""


def test_kpop_bounds_the_larger_kl_between_a_token_and_all_others():
    p, q, values = zip(*BINARY, strict=True)
    batch = TokenBatch.packed(torch.tensor(p).log(), torch.tensor(q).log(), [len(p)])
    assert binary_kl(batch).tolist() == pytest.approx(values, rel=1e-4, abs=1e-7)
    settings = CorrectionSettings(use_rs=True, rs_rules=("token_binary_kl=0.1",))
    kept = correct(batch, settings.correction())
    assert kept.mask.tolist() == [value <= 0.1 for value in values]
    assert kept.metrics["correction/rejected_high_fraction"] == 0.5
    # A bound of the ratio rejects the fourth, which neither policy is likely to draw.
    by_ratio = CorrectionSettings(use_rs=True, rs_rules=("token_k1=0.1_10",))
    assert kept.mask[3] and not correct(batch, by_ratio.correction()).mask[3]


def test_all_metrics_have_to_keep_a_token():
    found = mask_of("token_k1=0.625_1.6", "seq_mean_k3=0.03")
    assert torch.equal(found, verls("token_k1,seq_mean_k3", "0.625_1.6,0.03"))
    assert torch.equal(found, mask_of("token_k1=0.625_1.6") & mask_of("seq_mean_k3=0.03"))
    assert not torch.equal(found, mask_of("token_k1=0.625_1.6"))


def test_bounds_of_k1_are_of_the_ratio_and_one_number_is_the_upper_one():
    assert mask_of("token_k1=1e-9_1.5")[0].tolist() == [False, True, True, True]
    assert torch.equal(mask_of("token_k1=1.6"), mask_of("token_k1=0.625_1.6"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["seq_k3=1"], "rs_rules=seq_k3=1: no such metric. Use one of token_k1, "),
        (["token_k3"], "rs_rules=token_k3: token_k3 has one positive number for bounds"),
        (["token_k3=0.1_1"], "token_k3 has one positive number for bounds"),
        (["token_k1=0_1"], "token_k1 has one or two positive numbers for bounds"),
        (["token_k1=nan"], "token_k1 has one or two positive numbers for bounds"),
        (["token_k1=2_1"], "the lower bound 2 is above the upper one"),
        (["token_k3=1", "token_k3=2"], "token_k3 is there twice. Give it once"),
    ],
)
def test_what_is_no_rule_is_refused(rules, message):
    with pytest.raises(FieldError) as error:
        CorrectionSettings(use_rs=True, rs_rules=tuple(rules))
    assert message in str(error.value)


def with_kl(kl, lengths, mask=None):
    flat = torch.zeros(len(kl))
    mask = None if mask is None else torch.tensor(mask)
    return TokenBatch.packed(flat, flat, lengths, mask, kl=torch.tensor(kl))


def test_trm_drops_a_sequence_whose_largest_kl_is_above_the_bound():
    settings = CorrectionSettings(use_rs=True, rs_rules=("seq_max_kl=0.0625",))
    batch = with_kl([0.0, 0.0625, 0.03, 0.07, 0.0, 9.0, 0.01], [3, 2, 2], [1, 1, 1, 1, 1, 0, 1])
    found = correct(batch, settings.correction())
    assert found.mask.tolist() == [True] * 3 + [False] * 2 + [False, True]
    assert found.metrics["correction/rejected_high_fraction"] == pytest.approx(2 / 6)
    assert settings.correction().bounds_kl and settings.correction().looks_at_sequences
    above = with_kl([torch.tensor(0.0625).nextafter(torch.tensor(1.0)).item()], [1])
    assert not correct(above, settings.correction()).mask.any()
    for worst in (math.inf, math.nan):
        assert not correct(with_kl([0.0, worst], [2]), settings.correction()).mask.any()


def test_trm_sees_tokens_apart_whose_ratios_cancel():
    """THUDM/slime#1568: sums and means over a sequence let such a sequence pass."""
    p, q = (
        torch.tensor([[0.2, 0.8], [0.8, 0.2]]).log(),
        torch.tensor([[0.8, 0.2], [0.2, 0.8]]).log(),
    )
    batch = TokenBatch.packed(p[:, 0], q[:, 0], [2])
    batch = dataclasses.replace(batch, kl=likeliest_kl(p, q))
    assert batch.kl.tolist() == pytest.approx([0.6 * math.log(4)] * 2, abs=1e-5)
    for rule, passes in (("seq_sum_k1=0.9_1.1", True), ("seq_max_kl=0.05", False)):
        settings = CorrectionSettings(use_rs=True, rs_rules=(rule,))
        assert bool(correct(batch, settings.correction()).mask.all()) == passes


def test_trm_is_refused_where_only_the_sampled_tokens_are_known():
    settings = CorrectionSettings(use_rs=True, rs_rules=("seq_max_kl=0.05",))
    with pytest.raises(ValueError, match="seq_max_kl: needs the KL between whole distributions"):
        correct(by_log_ratios(R), settings.correction())
    with pytest.raises(ValueError, match="must be the same number of tokens"):
        TokenBatch.packed(torch.zeros(2), torch.zeros(2), [1, 1], kl=torch.zeros(3))
