"""What `onpolicy serve` finds out before it starts a server."""

import dataclasses

import pytest

from onpolicy.config.groups import EngineCountConfig, ModelConfig, SessionsConfig
from onpolicy.config.tools import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.run.commands.serve import checked_spec, needs_of_servers
from onpolicy.run.launch import memory_checks


@pytest.fixture
def config(checkpoint):
    return ServeConfig(model=ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"))


def test_servers_that_do_not_fit_the_memory_are_refused_with_the_sum(config, monkeypatch):
    spec = checked_spec(config)
    (one,) = needs_of_servers(config, spec).held(0, 1)
    monkeypatch.setattr(memory_checks, "free_memory", lambda: 2 * one.bytes)
    two, three = (
        dataclasses.replace(config, engines=EngineCountConfig(rollout_num_engines=n))
        for n in (2, 3)
    )
    checked_spec(two)
    with pytest.raises(ConfigError, match=r"^memory=.* GiB together: .*3 x SGLang server: "):
        checked_spec(three)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gateway_host": "no.such.host.invalid"}, r"^--gateway-host=no.such.*can listen there"),
        ({"tool_call_parser": "none such"}, r"^--tool-call-parser=none such: SGLang has no such"),
    ],
)
def test_sessions_that_cannot_be_served_are_refused_before_anything_starts(config, given, says):
    gateway = SessionsConfig(sessions=True, **given)
    with pytest.raises(ConfigError, match=says):
        checked_spec(dataclasses.replace(config, gateway=gateway))
