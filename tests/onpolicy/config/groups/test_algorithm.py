"""What an objective and the terms beside it contradict, and what would do nothing."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl"]
LOG_RATIO = ["--log-ratio-coef", "0.1"]
BYPASS = "--use-rollout-logprobs"
REMAX = ["--advantage-estimator", "remax", "--custom-rm-path", "a.b"]


def check(*argv):
    rule = [] if {"--custom-rm-path", "--environment"} & {*argv} else ["--rm-type", "exact"]
    validate(parse(TrainConfig, [*GOOD, *rule, *argv], "onpolicy train"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--entropy-target", "1"], r"--entropy-target=1.0: only --entropy-ctrl adaptive reads it"),
        (["--entropy-ctrl", "adaptive", "--entropy-coef", "2"],
         r"--entropy-coef=2: must not exceed --entropy-coef-max 1\. Change one of them"),
        (LOG_RATIO, r"--log-ratio-coef=0.1: in the only optimizer step of a rollout pi_old is pi"),
        ([*LOG_RATIO, BYPASS, "--true-on-policy-mode"], r"--log-ratio-coef=0.1: in the only"),
        (["--kl-cov-ratio", "0.1"], r"--kl-cov-ratio=0.1: in the only optimizer step of a rollout"),
        (["--clip-cov-ratio", "0.1", "--clip-cov-lb", "6"],
         r"--clip-cov-lb=6.0: must not exceed --clip-cov-ub 5.0"),
        (["--clip-cov-ub", "6"], r"--clip-cov-ub=6.0: only --clip-cov-ratio reads it"),
        (["--kl-cov-coef", "6"], r"--kl-cov-coef=6.0: only --kl-cov-ratio reads it"),
        (["--top-entropy-quantile", "0"], r"--top-entropy-quantile=0.0: must be greater than 0"),
        (["--positive-nll-above", "1"], r"--positive-nll-above=1.0: only --positive-nll-coef reads"),
        ([*REMAX, "--rollout-schedule", "free"], r"--advantage-estimator=remax: with .* the clock"),
        ([*REMAX, "--rollout-segment-tokens", "4"], r"=remax: with --rollout-segment-tokens an answer"),
        ([*REMAX, "--group-rm"], r"=remax: with --group-rm a reward depends on the samples beside it"),
        ([*REMAX, "--overlong-buffer-len", "4"], r"=remax: --overlong-buffer-len takes something off"),
        ([*REMAX[:2], "--environment", "a.b"], r"=remax: an episode of an agent may fail"),
        ([*REMAX, "--gamma", "0.9"], r"--gamma=0.9: only --advantage-estimator gae, reinforce or rein"),
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
        ["--kl-cov-ratio", "0.1", "--kl-cov-coef", "2", BYPASS],
        ["--clip-cov-ratio", "0.1", "--clip-cov-lb", "-1", "--top-entropy-quantile", "0.2"],
        [*LOG_RATIO, "--global-batch-size", "128"],
        ["--positive-nll-coef", "0.1", "--positive-nll-above", "-1"],
        [*REMAX, "--n-samples-per-prompt", "1", "--dynamic-sampling", "--rollout-lag", "1"],
    ],
)
def test_what_is_read_is_accepted(argv):
    check(*argv)
