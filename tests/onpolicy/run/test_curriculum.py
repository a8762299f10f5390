"""Runs with a curriculum: one hash however often they are interrupted, by what was measured."""

import pytest

from tests.support.run_in_memory import Interrupted, interrupted_at, run_in_memory

pytestmark = pytest.mark.usefixtures("one_process")

SCHEDULES = {
    "in step": {},
    "with a lag": {"rollout_lag": 2},
    "of two sources": {"prompt_data_weights": (2.0, 1.0)},
    "with others drawn": {"dynamic_sampling": True, "over_sampling_batch_size": 4},
}
VALUES = {"curriculum": "failures", "num_rollout": 6, "curriculum_pass_reward": 0.5}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_run_that_is_interrupted_has_the_hash_of_one_that_is_not(tmp_path, schedule):
    values = {**VALUES, **schedule}
    whole = run_in_memory(tmp_path / "whole", **values)
    saves = {"save": str(tmp_path / "part" / "save"), "save_interval": 1}
    saves["load"] = saves["save"]
    for step in (2, 4):
        with pytest.raises(Interrupted):
            run_in_memory(tmp_path / "part", make_run=interrupted_at(step), **values, **saves)
    part = run_in_memory(tmp_path / "part", **values, **saves)
    assert part.run_hash == whole.run_hash
    without = run_in_memory(tmp_path / "without", **{**values, "curriculum": ""})
    assert without.run_hash != whole.run_hash
