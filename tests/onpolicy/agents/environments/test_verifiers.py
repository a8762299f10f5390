"""Environments of the `verifiers` package play unmodified, in a Python of their own."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from onpolicy.agents.agent_workers import WorkerRollouter
from onpolicy.agents.environments import environment_choice as ours
from onpolicy.agents.gateway.gateway_server import Gateway
from onpolicy.agents.gateway.parsing import AnswerParser
from onpolicy.agents.gateway.session import SessionRules
from onpolicy.agents.gateway.session_rollouter import acts_by
from onpolicy.config.groups.agent_flags import AgentConfig
from onpolicy.errors import AgentError, ConfigError
from tests.support.acting import PROMPT, Says, SpelledOut, decode, roll_out
from tests.support.own_pythons import AGENTS, python_of

ROOT = Path(__file__).parents[4]
FAILS = "environments_for_verifiers"
LOCAL = '{"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}'


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """The environments of the tests and of the example are found, and uv, by which harnesses run."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/support'}:{ROOT / 'examples/verifiers'}")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{AGENTS / 'verifiers/bin'}")


def config_of(name, arguments="{}"):
    python = python_of("verifiers")
    return AgentConfig(
        environment=f"verifiers:{name}", environment_args=arguments, environment_python=python
    )


def rolled_out(config, row, *answers):
    rules = SessionRules(template=SpelledOut(), parser=AnswerParser())
    workers = WorkerRollouter(ours.environment_function(config), 1, 30.0)
    rollouter = acts_by(workers, lambda: Gateway(rules))
    metadata = {"task": row["task"], "hash": row["hash"]}
    try:
        return roll_out(rollouter, Says(list(answers)), prompt=replace(PROMPT, metadata=metadata))
    finally:
        rollouter.close()


def test_its_tasks_are_the_prompts_and_its_rewards_those_of_the_episode():
    config = config_of("onpolicy-letters")
    rows = [row for _, row in ours.environment_rows(config)]
    assert [row["task"] for row in rows] == [*range(6)] and len({row["hash"] for row in rows}) == 6
    assert rows[4]["prompt"] == [{"role": "user", "content": "?"}]
    sample = rolled_out(config, rows[4], "c", "", "e").samples[0]
    text = "user:?|assistant:c<stop>user:>|assistant:<stop>user:!|assistant:e<stop>"
    assert decode(sample.trajectory.token_ids) == text
    assert (sample.reward, sample.metrics["verifiers/found"]) == (1.0, 1.0)
    assert sample.info == {"ended": "user_closed", "is_truncated": False}


def test_what_fails_in_it_fails_the_episode_and_is_no_reward_of_0():
    config = config_of(FAILS, LOCAL)
    row, _ = (row for _, row in ours.environment_rows(config))
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "0?"}
    ]  # fmt: skip
    with pytest.raises(AgentError, match=r"ended with exit code 1, .*KeyError: .*no such reward"):
        rolled_out(config, row, "a")
    with pytest.raises(AgentError, match="task 0 is another than at the run's start"):
        rolled_out(config, {**row, "hash": "of an earlier version"}, "a")


LOADS = """
import runpy, sys
load = runpy.run_path(sys.argv[1])["load"]
for name, config in zip(sys.argv[2::2], sys.argv[3::2]):
    try:
        print(len(load(name, config)[1]))
    except Exception as error:
        print(type(error).__name__, str(error).split("\\n")[0])
"""


def test_what_no_episode_can_be_trained_on_is_refused_and_tasks_are_selected():
    """In one process, since the package takes seconds to import."""
    asked = {
        (FAILS, '{"taskset": {"count": 0}}'): "ValueError its tasks have no end",
        (FAILS, '{"taskset": {"count": 0}, "select": {"limit": 3}}'): "3",
        ("onpolicy-letters", '{"select": {"skip": 4}}'): "2",
        (FAILS, '{"id": "user-sim"}'): "ValueError it has the agents assistant, user",
        (FAILS, '{"unknown": 1}'): "ValidationError",
    }
    program = ROOT / "onpolicy/agents/environments/verifiers_program.py"
    command = [python_of("verifiers"), "-c", LOADS, program, *(x for each in asked for x in each)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line, expected in zip(done.stdout.splitlines(), asked.values(), strict=True):
        assert line.startswith(expected)


def test_one_that_is_not_there_is_refused_with_what_to_do(tmp_path):
    config = AgentConfig(
        environment="verifiers:no-such", environment_python=str(tmp_path / "python")
    )
    with pytest.raises(ConfigError, match=r"--environment-python=.*there is no program"):
        ours.environment_function(config)
    (tmp_path / "python").symlink_to("/bin/false")
    with pytest.raises(
        ConfigError, match=r"verifiers:no-such: cannot be loaded by .*Install verifiers"
    ):
        [*ours.environment_rows(config)]
