"""Numbers of every flag of every command."""

import math
import typing
from functools import cache

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_types, spelled, with_flags
from onpolicy.config.rules import require_ranges
from onpolicy.config.tool_flags import BenchConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError

COMMANDS = {TrainConfig: [], VerifyConfig: [], BenchConfig: ["step"], ServeConfig: []}


def numbers(kind):
    """Flags whose values are of a kind: alone, or one of several, or optional."""
    for config_class in COMMANDS:
        for name, hint in flag_types(config_class).items():
            if hint is kind or kind in typing.get_args(hint):
                yield config_class, name


def check_argument(config_class, name, value):
    argv = [*COMMANDS[config_class], f"{spelled(name)}={value}"]
    require_ranges(parse(config_class, argv, "x"))


@cache
def defaults(config_class):
    return parse(config_class, COMMANDS[config_class], "x")


def check_field(config_class, name, value):
    """What the same argument leads to, without a parser, which takes longer to make."""
    several = typing.get_origin(flag_types(config_class)[name]) in (list, tuple)
    values = {name: (value,) if several else value}
    require_ranges(with_flags(defaults(config_class), values))


FLOATS = (check_argument, "nan"), (check_field, -math.inf), (check_field, 1e39)
INTEGERS = (check_argument, 10**30), (check_field, -(10**30))


@pytest.mark.parametrize(
    ("kind", "beyond", "says"),
    [(float, FLOATS, ""), (int, INTEGERS, ".*Give a (smaller|larger) value")],
)
def test_no_flag_takes_what_is_no_finite_float32_or_beyond_32_bits(subtests, kind, beyond, says):
    for config_class, name in numbers(kind):
        for check, value in beyond:
            refused = pytest.raises(ConfigError, match=f"{spelled(name)}={says}")
            with subtests.test(f"{config_class.__name__} {name}={value}"), refused:
                check(config_class, name, value)


@pytest.mark.parametrize(
    "argv",
    [["--tis-upper-bound", "inf"], ["--rs-upper-bound", "inf"], ["--eval-temperature", "0"]],
)
def test_what_has_a_meaning_at_its_end_is_taken(argv):
    require_ranges(parse(TrainConfig, argv, "x"))
