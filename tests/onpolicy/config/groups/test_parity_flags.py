"""Formats of rounded numbers: which commands take them, and beside what."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.tool_flags import ExplainConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError

STOCK = ["--no-true-on-policy-mode"]


def in_tool(config_class, *what):
    def run(*argv):
        validate(parse(config_class, [*what, "--hf-checkpoint", "/m", *argv], "onpolicy"))

    return run


TOOLS = {
    "verify": in_tool(VerifyConfig),
    "explain": in_tool(ExplainConfig),
    "serve": in_tool(ServeConfig),
}


@pytest.fixture(autouse=True)
def _in_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_weight_format_is_for_commands_that_round():
    asked = ("--rollout-weight-format", "int4")
    for tool in TOOLS.values():
        tool(*asked)
    with pytest.raises(ConfigError, match=r"--rollout-weight-format=int4: .*the run that pushes"):
        TOOLS["serve"](*asked, *STOCK)


def test_rounded_inputs_are_for_engines_that_both_have_them():
    asked = ("--rollout-activation-format", "fp8_e4m3")
    for tool in TOOLS.values():
        tool(*asked)
        with pytest.raises(
            ConfigError, match=r"--rollout-activation-format=fp8_e4m3: both engines"
        ):
            tool(*asked, *STOCK)
