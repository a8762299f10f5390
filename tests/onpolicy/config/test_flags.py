"""Records as flags: every field is one, every flag is read, and what they refuse speaks of flags."""

import ast
from pathlib import Path

import pytest

from fallback_correction.config import DiscrepancyConfig
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.config.flags import flag_types, flag_values, flags_of, spelled, with_flags
from onpolicy.config.tool_flags import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError

ROOT = Path(__file__).parents[3]


def sources():
    for package in ("onpolicy", "fallback_correction", "benchmarks"):
        yield from (ROOT / package).rglob("*.py")


def attributes_read():
    """The names of all attributes that some code reads."""
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield node.attr


def test_a_field_of_a_record_is_a_flag_unless_the_group_says_that_it_is_none():
    names = flag_types(TrainConfig)
    assert {"dc_lambda", "governor_k3", "length_decay_period", "tis_level"} <= {*names}
    assert not {"dc_lambda_min", "governor_ess", "length_decay_burn_in", "rs_veto_by"} & {*names}
    assert TrainConfig().trainer.length_decay.detector.burn_in == 10


def test_every_flag_is_a_field_that_something_reads():
    read = {*attributes_read(), "custom_config_path"}  # the parser's own
    for config_class in (TrainConfig, VerifyConfig, BenchConfig, ServeConfig):
        assert [flag.name for flag in flags_of(config_class) if flag.path[-1] not in read] == []


def test_no_two_flags_have_one_name():
    for config_class in (TrainConfig, VerifyConfig, BenchConfig, ServeConfig):
        names = [flag.name for flag in flags_of(config_class)]
        assert len(set(names)) == len(names) and names == list(flag_types(config_class))


NUMBERS = [flag for flag in flags_of(TrainConfig) if flag.kind in (int, float)]


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
def test_a_number_on_the_command_line_arrives_in_its_field_and_nowhere_else(flag):
    default = flag.value(TrainConfig())
    value = next(x for x in (default / 2 + 1, default / 2, default + 1) if _is_taken(flag, x))
    config = parse(TrainConfig, [f"{spelled(flag.name)}={flag.kind(value)}"], "x")
    assert flag.value(config) == flag.kind(value)
    assert flag_values(config) == {**flag_values(TrainConfig()), flag.name: flag.kind(value)}


def _is_taken(flag, value):
    try:
        with_flags(TrainConfig(), {flag.name: flag.kind(value)})
    except ConfigError:
        return False
    return flag.kind(value) != flag.value(TrainConfig())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dc-mode", "lagrangian", "--dc-lambda", "2"], r"^--dc-lambda=2.0: must lie in \[0.0, 1.0\]"),
        (["--governor-k3", "0"], r"^--governor-k3=0.0: must be greater than 0\. Give a larger value\."),
    ],
)  # fmt: skip
def test_what_a_record_refuses_is_said_in_the_names_of_flags(argv, message):
    with pytest.raises(ConfigError, match=message):
        parse(TrainConfig, argv, "x")


def test_flags_can_be_changed_wherever_they_are():
    config = with_flags(TrainConfig(), {"seed": 3, "lr": 0.5, "length_decay_period": 7})
    assert (config.seed, config.trainer.lr) == (3, 0.5)
    assert config.trainer.length_decay.period == 7
    group = with_flags(groups.FallbackConfig(), {"use_tis": True, "dc_lambda": 0.2})
    assert group == groups.FallbackConfig(use_tis=True, dc=DiscrepancyConfig(mode="", lambda_=0.2))
    with pytest.raises(KeyError, match="no_flag"):
        with_flags(TrainConfig(), {"no_flag": 1})
