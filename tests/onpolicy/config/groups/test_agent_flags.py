"""The flags of agents, and what reads them."""

import pytest

from onpolicy.config.rules import validate
from onpolicy.errors import ConfigError
from tests.support.run_in_memory import make_config

ACTS = {
    "custom_generate_function_path": "agent.act", "rm_type": "exact", "prompt_data": ("p.jsonl",),
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [{"episode_time_limit": 3.0}, {"episode_failures": "drop"}, {"rollout_max_context_len": 99}],
)
def test_what_only_an_agent_reads_is_refused_without_one(tmp_path, values):
    validate(make_config(tmp_path, **ACTS, **values))
    with pytest.raises(ConfigError, match=r"only --custom-generate-function-path.* reads it"):
        validate(make_config(tmp_path, **{**ACTS, **values, "custom_generate_function_path": ""}))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"episode_time_limit": 0.0}, "--episode-time-limit=0"),
        ({"rollout_max_context_len": 1}, "--rollout-max-context-len=1: must be at least 2"),
        ({"rollout_max_context_len": 6}, "do not fit"),
    ],
)
def test_a_limit_that_leaves_no_room_is_refused(tmp_path, values, says):
    with pytest.raises(ConfigError, match=says):
        validate(make_config(tmp_path, **ACTS, **values))


def test_an_agent_needs_no_reward_rule_and_takes_one_at_most(tmp_path):
    validate(make_config(tmp_path, **{**ACTS, "rm_type": ""}))
    with pytest.raises(ConfigError, match="a run needs exactly one of them"):
        validate(make_config(tmp_path, rm_type="", prompt_data=("p.jsonl",)))
    with pytest.raises(ConfigError, match=r"beside --custom-rm-path=a\.b, and a run needs exactly"):
        validate(make_config(tmp_path, **ACTS, custom_rm_path="a.b"))
