"""A reward function that begins to fail while a run is under way."""

import pytest

from tests.support.train_runs import finish, metrics_of

pytestmark = [pytest.mark.engine, pytest.mark.runs]


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
