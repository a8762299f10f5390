"""What --environment means, and what it is refused with."""

import pytest

from onpolicy.agents.environments.environment_choice import environment_function
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError
from onpolicy.run.launch.inputs import make_rollouter

CLASS = "tests.onpolicy.agents.environments.test_environment_choice:Class"
ARGV = ["--hf-checkpoint", "/m"]
DATA = ["--prompt-data", "/d.jsonl"]


class Class:
    """An environment that is only looked for."""


def config_of(*argv):
    config = parse(TrainConfig, [*ARGV, *argv], "onpolicy train")
    validate(config)
    return config


@pytest.mark.parametrize(
    "name", [CLASS, CLASS.replace(":", "."), f"{__file__}:Class"], ids=["colon", "dot", "file"]
)
def test_a_class_is_named_by_its_module_or_its_file(name):
    given = ["--environment-args", '{"a": 1}', "--environment-rewards", "turn"]
    function = environment_function(config_of(*DATA, "--environment", name, *given).agent)
    assert function.path == "onpolicy.agents.environments.stepped.roll_out"
    assert function.arguments["arguments"] == {"a": 1}
    assert function.arguments["rewards"] == "turn"


def test_an_openenv_server_is_named_by_its_address():
    given = ["--environment-args", '{"action": "message"}']
    config = config_of(*DATA, "--environment", "openenv:http://127.0.0.1:1", *given)
    assert environment_function(config.agent).arguments == {
        "environment": "onpolicy.agents.environments.stepped.OpenEnv",
        "arguments": {"url": "http://127.0.0.1:1", "action": "message"},
        "rewards": "episode",
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--environment", CLASS], "--prompt-data is missing"),
        ([*DATA, "--environment", CLASS, "--rm-type", "exact"], "the environment says the rewards"),
        ([*DATA, "--environment", "verifiers:x"], "the prompts are those of its dataset"),
        (
            [*DATA, "--environment", CLASS, "--custom-generate-function-path", "a.b"],
            "Give one of them",
        ),
        ([*DATA, "--environment", CLASS, "--environment-args", "[1]"], "must be a JSON object"),
        ([*DATA, "--environment", CLASS, "--environment-args", "{"], "must be a JSON object"),
        ([*DATA, "--rm-type", "exact", "--environment-args", '{"a": 1}'], "--environment-args"),
        (
            ["--environment", "verifiers:x", "--environment-rewards", "turn"],
            "--environment-rewards",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        config_of(*argv)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.Class", "cannot be imported"),
        (f"{__file__}:Missing", "has no 'Missing'"),
        (f"{__file__}:ARGV", "is a list, not a function"),
    ],
)
def test_a_class_that_is_not_there_is_refused_before_anything_starts(name, message):
    with pytest.raises(ConfigError, match=f"--environment={name}.*{message}"):
        make_rollouter(config_of(*DATA, "--environment", name))
