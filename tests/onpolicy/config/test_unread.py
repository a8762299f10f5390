"""Flags that nothing would read."""

from fnmatch import fnmatchcase

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.flags import flag_types, spelled
from onpolicy.config.tools import BenchConfig
from onpolicy.config.unread import READERS, refuse_unread
from onpolicy.errors import ConfigError

FLAGS = [*flag_types(TrainConfig), *flag_types(BenchConfig)]

# A flag that is not its default, and what makes something read it.
PAIRS = [
    (["--megatron-tp", "2"], ["--train-backend", "megatron"]),
    (["--no-megatron-distributed-optimizer"], ["--train-backend", "megatron"]),
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
    (["--dc-margin", "0.1"], ["--dc-mode", "margin"]),
    (["--dc-budget", "0.1"], ["--dc-mode", "lagrangian"]),
    (["--governor-highest", "tis"], ["--mismatch-governor"]),
    (["--length-decay-burn-in", "3"], ["--lr-schedule", "length-decay"]),
    (["--kl-loss-type", "k1"], ["--use-kl-loss"]),
    (["--use-unbiased-kl"], ["--use-kl-loss"]),
    (["--ref-checkpoint", "/r"], ["--use-kl-loss"]),
    (["--opsm-delta", "0.1"], ["--use-opsm"]),
    (["--n-samples-per-eval-prompt", "4"], ["--eval-interval", "2"]),
    (["--wandb-project", "x"], ["--use-wandb"]),
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


def test_every_row_is_about_flags_that_there_are():
    for reader in READERS:
        for pattern in reader.flags.split():
            assert any(fnmatchcase(name, pattern) for name in FLAGS), spelled(pattern)
