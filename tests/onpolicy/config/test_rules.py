"""Rules beside fields: flags that nothing would read, and a new flag that is added in one place."""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from fallback_correction.ranges import ReadBy, at_least
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, rules, validate
from onpolicy.config.flags import flag_types, flags_of
from onpolicy.config.rules import (
    NO_RESULT,
    Against,
    Facts,
    Together,
    decides_results,
    refuse_unread,
)
from onpolicy.config.sft_flags import SftConfig
from onpolicy.config.tool_flags import BenchConfig, ExplainConfig, ServeConfig, VerifyConfig
from onpolicy.errors import ConfigError

COMMANDS = {
    TrainConfig: [], SftConfig: [], VerifyConfig: [], ExplainConfig: [], ServeConfig: [],
    BenchConfig: ["step"],
}  # fmt: skip

# A flag that is not its default, and what makes something read it.
PAIRS = [
    (["--megatron-tp", "2"], ["--train-backend", "megatron"]),
    (["--tis-batch-normalize"], ["--use-tis"]),
    (["--tis-level", "sequence"], ["--mismatch-governor"]),
    (["--tis-upper-bound", "3"], ["--get-mismatch-metrics"]),
    (["--tis-upper-bound", "3"], ["--use-rs"]),
    (["--use-tis", "--tis-lower-bound", "0.5"], ["--tis-mode", "clip"]),
    (["--use-tis", "--tis-lower-bound", "0.5"], ["--use-rs"]),
    (
        ["--true-on-policy-mode", "--tis-nonfinite", "reject"],
        ["--parity-policy", "fallback", "--use-tis"],
    ),
    (
        ["--true-on-policy-mode", "--tis-nonfinite", "reject"],
        ["--parity-policy", "fallback", "--dc-mode", "fixed"],
    ),
    (["--true-on-policy-mode", "--tis-nonfinite", "reject"], ["--no-true-on-policy-mode"]),
    (["--keep-checkpoints", "2"], ["--save", "/s"]),
    (["--allow-changed-settings", "lr"], ["--load", "/s"]),
    (["--tis-mode", "clip"], ["--custom-tis-function-path", "a.b"]),
    (["--rs-level", "geometric"], ["--use-rs"]),
    (["--no-rejected-in-denominator"], ["--use-rs"]),
    (["--dc-measure", "log"], ["--dc-mode", "fixed"]),
    (["--dc-budget", "0.1"], ["--dc-mode", "lagrangian"]),
    (["--governor-highest", "tis"], ["--mismatch-governor"]),
    (["--kl-loss-type", "k1"], ["--use-kl-loss"]),
    (["--ref-checkpoint", "/r"], ["--use-kl-loss"]),
    (["--n-samples-per-eval-prompt", "4"], ["--eval-interval", "2"]),
    (["--no-correct-lag"], ["--rollout-lag", "1"]),
    (["--no-correct-lag"], ["--rollout-schedule", "free"]),
    (["--rollout-lag", "1", "--no-correct-lag", "--tis-level", "sequence"], ["--correct-lag"]),
]


@pytest.mark.parametrize(("flag", "switch"), PAIRS)
def test_a_flag_is_refused_unless_something_reads_it(flag, switch):
    name = [arg for arg in flag if arg.startswith("--")][-1].replace("--no-", "--")
    with pytest.raises(ConfigError, match=rf"{name}=.*nothing here"):
        refuse_unread(parse(TrainConfig, flag, "x"))
    refuse_unread(parse(TrainConfig, [*flag, *switch], "x"))


@pytest.mark.parametrize("correction", ["--use-tis", "--use-rs", "--use-rollout-logprobs"])
def test_there_is_no_default_to_switch_off_beside_a_correction_that_is_asked_for(correction):
    with pytest.raises(ConfigError, match=r"--correct-lag=False.* no other correction"):
        refuse_unread(
            parse(TrainConfig, ["--rollout-lag", "1", "--no-correct-lag", correction], "x")
        )


def test_a_flag_that_is_given_as_its_default_is_none():
    refuse_unread(parse(TrainConfig, ["--megatron-tp", "1", "--dc-eta", "1.0"], "x"))


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """What a contributor writes for a new flag, and all of it."""

    use_new: bool = False
    """Read the flag below."""

    new_flag: Annotated[
        int,
        at_least(1),
        ReadBy("--use-new", lambda run: run.use_new),
        Against(lambda run: run.plan.may_align and run.lr, "has no bits with --lr {found}"),
        NO_RESULT,
    ] = 1
    """Help of the flag."""


@dataclass(frozen=True, kw_only=True)
class WithNewGroup(TrainConfig):
    """A run with that group."""

    new: NewGroup = field(default_factory=NewGroup)


GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--use-new", "--new-flag", "0"], "--new-flag=0: must be at least 1"),
        (["--new-flag", "2"], "--new-flag=2: only --use-new reads it"),
        (
            ["--use-new", "--new-flag", "2", "--true-on-policy-mode"],
            "--new-flag=2: has no bits with --lr 1e-06. Leave one of the two out.",
        ),
    ],
)
def test_a_new_flag_is_one_field_with_its_rules_beside_it(argv, message):
    with pytest.raises(ConfigError, match=message):
        validate(parse(WithNewGroup, [*GOOD, *argv], "x"))
    config = parse(WithNewGroup, [*GOOD, "--use-new", "--new-flag", "2"], "x")
    validate(config)
    flags = {flag.name: flag for flag in flags_of(WithNewGroup)}
    assert config.new.new_flag == 2 and flags["new_flag"].help == "Help of the flag."
    assert [decides_results(flags[name]) for name in ("use_new", "new_flag")] == [True, False]


def test_rules_can_be_asked_of_every_command():
    """A rule that names a flag which one of the commands lacks would be an error there."""
    for config_class, argv in COMMANDS.items():
        config = parse(config_class, argv, "x")
        run = Facts.of(config)
        for flag in flags_of(config_class):
            record = flag.record(config) if flag.prefix else run
            for asked, notes in ((record, flag.notes), (run, flag.outer)):
                for note in notes:
                    if isinstance(note, ReadBy):
                        note.reads(asked)
                    elif isinstance(note, Against | Together) and _has_value(flag, config):
                        note.when(run)


def _has_value(flag, config):
    return flag.value(config) is not None  # a rule is asked of values that are given


def test_no_module_beside_the_records_names_flags_in_tables():
    """`settings` knows what a longer run is, `train` which value is a key, `plan` what comes on."""
    names = {name.replace("-", "_") for name in flag_types(TrainConfig)}
    room = Path(rules.__file__).parent
    for file in room.glob("*.py"):
        strings = {
            n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)
        }
        found = {s for s in strings if isinstance(s, str) and "_" in s} & names
        assert found <= MAY_NAME.get(file.name, set()), file.name


MAY_NAME = {
    "settings.py": {"num_rollout", "lr_decay_style", "rollout_lag"},
    "train_flags.py": {"rollout_api_key", "use_tis", "use_rs"},
    "rules.py": {"rollout_api_key"},
}
