"""Runs that are not aligned, or not all the way: corrected, falling back, governed."""

import json

import pytest

from onpolicy.outputs.meanings import MEANINGS
from onpolicy.outputs.metrics import read_jsonl
from tests.support.train_runs import finish, metrics_of

pytestmark = [pytest.mark.engine, pytest.mark.runs]

STOCK = ("--no-true-on-policy-mode",)
INT8 = ("--rollout-weight-format", "int8")


def test_an_unaligned_rollout_is_measured_corrected_and_learnt_from(start, tmp_path):
    config = tmp_path / "mis.yaml"
    config.write_text(
        "use_tis: true\nuse_rs: true\ntis_level: token\ntis_mode: truncate\ntis_upper_bound: 1.02\n"
        "rs_level: sequence\nrs_lower_bound: 0.9\nrs_upper_bound: 1.1\nrs_veto_threshold: 1.0e-4\n"
        "tis_batch_normalize: true\ndc_mode: lagrangian\nlr_schedule: length-decay\n"
        "policy_loss: gspo\nloss_aggregation: seq-mean-token-mean\n"
    )
    argv = ["--custom-config-path", str(config), "--num-rollout", "2", *INT8]
    finish(start(tmp_path, *argv, mode=STOCK))
    records = metrics_of(tmp_path)
    assert len(records) == 2
    assert {name for record in records for name in record} - {"step", "rollout/reward/even"} <= (
        MEANINGS.keys()
    )
    for record in records:
        assert record["parity/num_mismatched_tokens"] > 0
        assert record["mismatch/k3"] > 1e-6
        assert 0 < record["mismatch/ess"] < 1
        assert 0 < record["correction/truncated_fraction"] < 1
        assert 0 < record["correction/rejected_fraction"] < 1
        assert record["correction/batch_norm_factor"] != 1
        assert record["dc/delta_mean"] > 0
        assert record["estimator/sequence_is_bias"] == 0 < record["estimator/token_is_bias"]
        assert record["lr_decay/scale"] == 1
        assert record["perf/log_probs_time"] > 0
    # lambda climbs with the violation of the budget, from the value that it starts with.
    assert records[0]["dc/lambda"] == 0.1
    step = records[0]["dc/lambda"] + records[0]["dc/violation"]
    assert records[1]["dc/lambda"] == pytest.approx(min(max(step, 0), 1))


def test_reinforce_in_bypass_is_weighted_by_the_losss_own_log_probs(start, tmp_path):
    argv = [
        "--use-rollout-logprobs", "--policy-loss", "reinforce", "--use-tis", "--tis-upper-bound",
        "1.01", "--use-rs", "--rs-level", "geometric", "--rs-statistic", "k3", "--rs-upper-bound",
        "5", "--advantage-estimator", "reinforce_plus_plus", "--num-rollout", "2", *INT8,
    ]  # fmt: skip
    finish(start(tmp_path, *argv, mode=STOCK))
    records = metrics_of(tmp_path)
    assert len(records) == 2
    for record in records:
        assert record["parity/num_mismatched_tokens"] > 0
        assert record["mismatch/k3"] > 1e-6
        assert 0 < record["correction/truncated_fraction"] < 1
        assert record["correction/weight_max"] == pytest.approx(1.01)
        assert record["correction/weight_mean_before"] > record["correction/weight_mean"]
        assert 0 <= record["correction/rejected_fraction"] < 1
        assert record["train/grad_norm"] > 0


ONE_BIT_OFF_AT_STEP_1 = """
from onpolicy.train.policy_trainer import PolicyTrainer
train = PolicyTrainer.train_share
def train_with_another_softmax(self, share, step, rates):
    log_softmax = self.operators.log_softmax
    if step == 1:
        self.operators.log_softmax = lambda x, t: log_softmax(x, t) * (1 + 2**-23)
    result = train(self, share, step, rates)
    self.operators.log_softmax = log_softmax
    return result
PolicyTrainer.train_share = train_with_another_softmax
"""


def test_a_mismatch_leads_to_the_correction_if_the_policy_is_to_fall_back(start, tmp_path):
    argv = ["--parity-policy", "fallback", "--use-tis", "--num-rollout", "3"]
    output = finish(start(tmp_path, *argv, in_ranks=ONE_BIT_OFF_AT_STEP_1))
    before, fallen, after = metrics_of(tmp_path)
    assert "Going on with the fallback correction" in output
    assert fallen["parity/num_fallbacks"] == 1
    assert fallen["parity/num_mismatched_tokens"] > 0
    assert fallen["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
    for record in (before, after):
        assert record["parity/num_mismatched_tokens"] == 0
        assert "correction/weight_mean" not in record


def test_the_governor_climbs_to_aligned_operators_and_down_again_and_resumes(start, tmp_path):
    """Rungs: mis 2, decay 3, aligned 4; up after each bad rollout, down after two calm ones."""
    save = str(tmp_path / "save")
    argv = [
        "--mismatch-governor", "--governor-k3", "1e-9", "--governor-rise-after", "1",
        "--governor-fall-after", "2", "--use-tis", "--use-rs", *INT8,
        "--save", save, "--load", save, "--save-interval", "3",
    ]  # fmt: skip
    output = finish(start(tmp_path, *argv, "--num-rollout", "3", mode=STOCK))
    assert "governor: mis -> decay (k3=" in output
    output = finish(start(tmp_path, *argv, "--num-rollout", "5", mode=STOCK))
    records = metrics_of(tmp_path)
    assert [r["governor/rung"] for r in records] == [3, 4, 4, 3, 4]
    mismatched = [r["parity/num_mismatched_tokens"] > 0 for r in records]
    assert mismatched == [True, True, False, False, True]
    assert [r["train/lr"] for r in records] == [1e-3, 5e-4, 1e-3, 1e-3, 5e-4]
    assert ["correction/rejected_low_fraction" in r for r in records] == mismatched
    moves = read_jsonl(tmp_path / "run" / "governor.jsonl")
    assert [(m["step"], m["from"], m["to"]) for m in moves] == [
        (0, "mis", "decay"), (1, "decay", "aligned"), (3, "aligned", "decay"),
        (4, "decay", "aligned"),
    ]  # fmt: skip
    assert "rollouts in a row" in moves[0]["reason"]
    state = json.loads((tmp_path / "save/step_000005/state.json").read_text())
    assert state["governor"] == {"rung": "aligned", "bad": 0, "calm": 0, "falls": 1}
