"""What an objective and the terms beside it contradict, and what would do nothing."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
LOG_RATIO = ["--log-ratio-coef", "0.1"]
BYPASS = "--use-rollout-logprobs"


def check(*argv):
    validate(parse(TrainConfig, [*GOOD, *argv], "onpolicy train"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--entropy-target", "1"], r"--entropy-target=1.0: only --entropy-ctrl adaptive reads it"),
        (["--entropy-ctrl", "adaptive", "--entropy-coef", "2"],
         r"--entropy-coef=2: must not exceed --entropy-coef-max 1\. Change one of them"),
        (LOG_RATIO, r"--log-ratio-coef=0.1: in the only optimizer step of a rollout pi_old is pi"),
        ([*LOG_RATIO, BYPASS, "--true-on-policy-mode"], r"--log-ratio-coef=0.1: in the only"),
        (["--positive-nll-above", "1"], r"--positive-nll-above=1.0: only --positive-nll-coef reads"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_or_contradicts_itself_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--entropy-ctrl", "adaptive", "--entropy-target", "1"],
        ["--entropy-coef", "2"],
        [*LOG_RATIO, BYPASS],
        [*LOG_RATIO, "--global-batch-size", "128"],
        ["--positive-nll-coef", "0.1", "--positive-nll-above", "-1"],
    ],
)
def test_what_is_read_is_accepted(argv):
    check(*argv)
