"""Runs whose episodes are rolled out in workers, on engines in memory."""

import pytest

from tests.support.run_in_memory import run_in_memory

pytestmark = pytest.mark.usefixtures("undrawn")

FUNCTION = "tests/support/agent_functions.py:forks"


@pytest.mark.parametrize("mode", [{}, {"rollout_lag": 1, "rollout_segment_tokens": 3}])
def test_a_run_has_the_same_hash_with_any_number_of_workers(tmp_path, mode):
    values = {"custom_generate_function_path": FUNCTION, "rollout_max_response_len": 9, **mode}
    ran = {
        workers: run_in_memory(tmp_path / str(workers), agent_workers=workers, **values)
        for workers in (0, 1, 2)
    }
    assert len({each.run_hash for each in ran.values()}) == 1
    assert all(each.totals.num_mismatched_tokens == 0 for each in ran.values())
