"""A reward function that weighs tokens in terms of the loss, on a real server."""

import json

import pytest

from tests.support.train_runs import finish, metrics_of, run_hash

pytestmark = [pytest.mark.engine, pytest.mark.runs]

WEIGHS = "--custom-rm-path", "own_reward.weighs"
KL = "--use-kl-loss", "--kl-loss-coef", "0.1", "--num-rollout", "2"


def test_weighed_tokens_train_aligned_and_to_other_bits(start, checkpoint, tmp_path):
    teacher = "--teacher-checkpoint", str(checkpoint), "--opd-loss", "full"
    weighed, plain = (
        finish(start(tmp_path / name, *argv, *KL, *teacher))
        for name, argv in (("weighed", WEIGHS), ("plain", ()))
    )
    records = metrics_of(tmp_path / "weighed")
    assert [record["parity/num_mismatched_tokens"] for record in records] == [0, 0]
    assert all(record["parity/num_compared_tokens"] > 0 for record in records)
    assert all(record["rollout/reward_errors"] == 0 for record in records)
    assert run_hash(weighed) != run_hash(plain)
    file = tmp_path / "weighed" / "run" / "samples" / "rollout_000000.jsonl"
    shown = [json.loads(line) for line in file.read_text().splitlines()]
    terms_of_each = [{*each["token_weights"]} for each in shown]
    assert terms_of_each and all(
        terms == {"objective", "kl_loss", "opd_kl"} for terms in terms_of_each
    )


def test_a_term_that_the_loss_does_not_have_is_refused_before_anything_starts(start, tmp_path):
    output = finish(start(tmp_path, *WEIGHS), code=2)
    assert "token_weights['kl_loss']: the loss of this run has no such term" in output
    assert "--use-kl-loss" in output and not (tmp_path / "run" / "metrics.jsonl").exists()
