"""A run that is corrected, since it is not aligned.

One that falls back: tests/onpolicy/run/test_combinations.py.
"""

import pytest

from onpolicy.outputs.meanings import MEANINGS
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
