"""Reward functions in whole runs: one that weighs tokens in terms of the loss, and one that fails."""

import json

import pytest

from tests.support.train_runs import finish, metrics_of

pytestmark = [pytest.mark.engine, pytest.mark.runs]

WEIGHS = "--custom-rm-path", "own_reward.weighs"
KL = "--use-kl-loss", "--kl-loss-coef", "0.1", "--num-rollout", "2"


def test_weighed_tokens_train_aligned(start, checkpoint, tmp_path):
    """To other bits than others: tests/onpolicy/training/test_rank_invariance.py."""
    teacher = "--teacher-checkpoint", str(checkpoint), "--opd-loss", "full"
    finish(start(tmp_path, *WEIGHS, *KL, *teacher))
    records = metrics_of(tmp_path)
    assert [record["parity/num_mismatched_tokens"] for record in records] == [0, 0]
    assert all(record["parity/num_compared_tokens"] > 0 for record in records)
    assert all(record["rollout/reward_errors"] == 0 for record in records)
    file = tmp_path / "run" / "samples" / "rollout_000000.jsonl"
    shown = [json.loads(line) for line in file.read_text().splitlines()]
    terms_of_each = [{*each["token_weights"]} for each in shown]
    assert terms_of_each and all(
        terms == {"objective", "kl_loss", "opd_kl"} for terms in terms_of_each
    )


def test_one_failure_is_counted_and_many_end_the_run_in_one_message(start, tmp_path):
    process = start(
        tmp_path, "--custom-rm-path", "own_reward.fails_more_and_more", "--rm-max-error-rate", "0.1",
        "--rm-workers", "2",
    )  # fmt: skip
    output = finish(process, code=1)
    assert sum(record["rollout/reward_errors"] for record in metrics_of(tmp_path)) == 1
    assert len(metrics_of(tmp_path)) == 2
    assert (
        "prompt 3, sample 1, raised LookupError: the judge is gone (own_reward.py, line" in output
    )
    ending = "RewardError: --custom-rm-path=own_reward.fails_more_and_more: 16 of 16 samples"
    assert output.count(ending) == 1
    assert 'raise LookupError("the judge is gone")' in output  # the first failure's traceback
