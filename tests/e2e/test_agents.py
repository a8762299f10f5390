"""Whole runs of an agent, as a user starts them."""

import shutil

import pytest

from tests.support.train_runs import finish, metrics_of, run_hash

AGENT = (
    "--custom-generate-function-path", "own_agent.act", "--rollout-max-context-len", "120",
    "--num-rollout", "3", "--rollout-segment-tokens", "5",
)  # fmt: skip


@pytest.mark.runs
def test_an_agent_is_trained_on_what_it_sampled_and_a_resumed_run_is_the_same(start, tmp_path):
    """Although what it observes is chance: the run has written it down."""
    save = tmp_path / "save"
    saves = ("--save", str(save), "--load", str(save), "--save-interval", "1")
    first = finish(start(tmp_path, *AGENT, *saves))
    assert all(r["parity/num_mismatched_tokens"] == 0 for r in metrics_of(tmp_path))
    assert all(r["rollout/num_failed_episodes"] == 0 for r in metrics_of(tmp_path))
    for later in sorted(save.glob("step_*"))[1:]:
        shutil.rmtree(later)
    again = finish(start(tmp_path, *AGENT, *saves, "--rollout-num-engines", "2"))
    assert run_hash(again) == run_hash(first)
