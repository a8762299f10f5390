"""Several metrics at once, under verl's names; and M2PO, as AReaL's function masks."""

import json
import math
from pathlib import Path

import pytest
import torch

from fallback_correction.adapters import verl
from fallback_correction.config import CorrectionConfig, CorrectionSettings
from fallback_correction.config.rejection_rules import METRICS
from fallback_correction.correction import correct
from fallback_correction.ranges import FieldError
from fallback_correction.ratios import log_ratios
from fallback_correction.rejection import beyond_second_moment
from fallback_correction.tokens import TokenBatch
from tests.support.token_batches import by_log_ratios

PEERS = json.loads((Path(__file__).parents[1] / "data/peer_losses.json").read_text())
R = torch.tensor(
    [[0.9, -0.1, 0.05, 0.0], [0.3, 0.2, -0.25, 0.1], [-1.5, 0.4, 0.0, 0.6], [0.0, 0.01, -0.02, 0.0]]
)


def mask_of(*rules):
    settings = CorrectionSettings(use_rs=True, rs_rules=rules)
    return correct(by_log_ratios(R.tolist()), settings.correction()).mask.view(R.shape)


def verls(names, thresholds):
    config = {"rollout_rs": names, "rollout_rs_threshold": thresholds}
    rollout = torch.full_like(R, -2.0)
    _, mask, _ = verl.compute_rollout_correction(
        config, old_log_prob=rollout + R, rollout_log_prob=rollout, response_mask=torch.ones_like(R)
    )
    return mask.bool()


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_keeps_what_verls_of_its_name_keeps(name):
    bound = "0.9_1.1111111" if name.endswith("k1") else "0.03"  # as much of rho as of 1 / rho
    assert torch.equal(mask_of(f"{name}={bound}"), verls(name, bound))
    assert mask_of(f"{name}={bound}").any() and not mask_of(f"{name}={bound}").all()


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


def peers_tokens():
    inputs = PEERS["inputs"]
    train, rollout = (
        torch.tensor([x for row in inputs[name] for x in row]) for name in ("log_probs", "old")
    )
    return TokenBatch.packed(train, rollout, inputs["lengths"])


@pytest.mark.parametrize("limit", PEERS["m2po"]["masks"])
def test_m2po_keeps_what_areals_function_keeps(limit):
    found = correct(peers_tokens(), CorrectionConfig(second_moment=float(limit)))
    want = [x for row in PEERS["m2po"]["masks"][limit] for x in row]
    assert found.mask.tolist() == want
    for name in ("m2po", "rejected"):
        share = found.metrics[f"correction/{name}_fraction"]
        assert share == pytest.approx(1 - sum(want) / len(want))


def test_m2po_keeps_the_same_tokens_however_they_lie_on_ranks():
    whole = by_log_ratios([[0.5, 0.1, -0.5], [0.5, 0.2]])
    rejected = beyond_second_moment(whole, log_ratios(whole), 0.12)
    assert rejected.tolist() == [True, False, True, True, False]  # equals go together
    everyone = log_ratios(whole).double().square()
    for part in ([[0.5, 0.1, -0.5]], [[0.5, 0.2]]):
        ours = by_log_ratios(part)
        alone = beyond_second_moment(ours, log_ratios(ours), 0.12, lambda _: everyone)
        assert alone.tolist() == [abs(r) == 0.5 for r in part[0]]


@pytest.mark.parametrize(("r", "kept"), [([0.5, 0.5], [True, True]), ([0.9, 0.5], [False, True])])
def test_m2po_keeps_the_smallest_where_no_mean_is_below_the_threshold(r, kept):
    batch = by_log_ratios([r])
    assert (~beyond_second_moment(batch, log_ratios(batch), 1e-6)).tolist() == kept


def test_m2po_of_no_tokens_is_nothing():
    batch = by_log_ratios([[math.nan]])
    empty = TokenBatch.packed(
        batch.train_log_probs, batch.rollout_log_probs, [1], torch.tensor([False])
    )
    assert not beyond_second_moment(empty, torch.zeros(1), 0.1).any()
