"""Formats of rounded numbers: which commands take them, and beside what."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.explain import ExplainConfig
from onpolicy.config.tools import ServeConfig, VerifyConfig
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


def test_weights_are_packed_by_servers_that_a_command_starts_of_rounded_ones_on_aligned_operators():
    packs, int4 = "--rollout-pack-weights", ("--rollout-weight-format", "int4")
    for tool in TOOLS.values():
        tool(packs, *int4)
        for none in ((), ("--rollout-weight-format", "bf16")):
            with pytest.raises(ConfigError, match=r"--rollout-pack-weights=True: .* to be packed"):
                tool(packs, *none)
    with pytest.raises(ConfigError, match=r"--rollout-pack-weights=True: aligned servers alone"):
        TOOLS["verify"](packs, *int4, *STOCK)
    of_bytes = ("--operators", "hopper_fp8", "--rollout-activation-format", "fp8_e4m3")
    with pytest.raises(ConfigError, match=r"--rollout-pack-weights=True: .* share a place"):
        TOOLS["verify"](packs, "--rollout-weight-format", "fp8_e4m3_block128", *of_bytes)
    with pytest.raises(ConfigError, match=r"--rollout-pack-weights=True: .*--rollout-server-url"):
        TOOLS["verify"](packs, *int4, "--rollout-server-url", "http://127.0.0.1:1")


def test_a_cache_in_eight_bits_is_for_engines_that_both_have_it():
    asked = ("--rollout-kv-format", "fp8_e4m3")
    for tool in TOOLS.values():
        tool(*asked)
        with pytest.raises(ConfigError, match=r"--rollout-kv-format=fp8_e4m3: both engines"):
            tool(*asked, *STOCK)
