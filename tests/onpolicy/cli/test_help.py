"""What --help shows: a first run's flags, a group, or all; and how soon."""

import re

import pytest

from onpolicy.cli.help import ALL, FIRST, help_asked, help_of
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_types, flags_of, spelled
from onpolicy.config.tool_flags import BenchConfig, EvaluateConfig
from onpolicy.errors import ConfigError

TRAIN = "onpolicy train"
FIRST_FLAGS = [spelled(name) for names in FIRST.values() for name in names]


def named(text):
    """The flags that have lines of their own, in order."""
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def test_it_shows_the_flags_of_a_first_run_in_their_order_and_where_the_others_are():
    shown = help_of(TrainConfig, TRAIN)
    assert named(shown) == FIRST_FLAGS and len({*FIRST_FLAGS}) == len(FIRST_FLAGS) <= 45
    assert f"All {len(flag_types(TrainConfig))} flags: onpolicy train --help all." in shown
    assert max(map(len, shown.splitlines())) <= 130


def test_all_flags_and_a_groups_are_shown_with_values_defaults_and_texts():
    everything = help_of(TrainConfig, TRAIN, ALL)
    assert named(everything) == [spelled(name) for name in flag_types(TrainConfig)]
    group = help_of(TrainConfig, TRAIN, "governor")
    assert named(group) == [
        spelled(flag.name) for flag in flags_of(TrainConfig) if flag.path[0] == "governor"
    ]
    assert "--governor-highest {tis,mis,decay,aligned}  (default: aligned)\n      " in group
    assert "--mismatch-governor, --no-mismatch-governor  (default: off)" in group
    with pytest.raises(ConfigError, match=r"--help=lr: there is no such group\. Give one of model"):
        help_of(TrainConfig, TRAIN, "lr")


def test_a_command_without_such_a_list_shows_all_and_what_has_no_name():
    shown = help_of(EvaluateConfig, "onpolicy eval")
    assert shown.startswith("usage: onpolicy eval CHECKPOINT [flags]")
    assert len(named(shown)) == len(flag_types(EvaluateConfig)) - 1
    assert "usage: onpolicy bench {rollout,decode" in help_of(BenchConfig, "onpolicy bench")


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--lr", "1"], None), (["-h"], ""), (["--help", "--lr", "1"], ""), (["--help", "eval"], "eval"),
        (["--lr", "1", "--help=all"], "all"),
    ],
)  # fmt: skip
def test_what_follows_is_the_group(argv, asked):
    assert help_asked(argv) == asked
