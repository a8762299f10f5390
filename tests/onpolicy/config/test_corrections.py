"""Which corrections run together, and the reason where they do not."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
BYPASS = ["--use-rollout-logprobs"]
REINFORCE = [*BYPASS, "--policy-loss", "reinforce"]
K3 = ["--use-rs", "--rs-statistic", "k3"]


def check(*argv):
    validate(parse(TrainConfig, [*GOOD, *argv], "onpolicy train"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*BYPASS, "--use-tis"],
         r"--use-tis=True: with --use-rollout-logprobs the ratio of --policy-loss ppo is pi / pi_rollout"
         r", and weights would count it twice\. Leave --use-tis out .*--policy-loss reinforce"),
        ([*BYPASS, "--use-tis", "--policy-loss", "cispo"], r"the ratio of --policy-loss cispo"),
        ([*BYPASS, "--use-tis", "--policy-loss", "gspo"], r"the ratio of --policy-loss gspo"),
        (REINFORCE, r"--policy-loss=reinforce: with --use-rollout-logprobs nothing would correct"),
        ([*REINFORCE, "--use-tis", "--tis-batch-normalize"],
         r"--tis-batch-normalize=True: .*before their mean over the global batch is known"),
        ([*REINFORCE, "--use-rs", "--no-rejected-in-denominator"],
         r"--rejected-in-denominator=False: .*before it is known how many"),
        ([*BYPASS, "--dc-mode", "fixed"], r"--dc-mode=fixed: .*pi_train is not known before the loss"),
        (["--use-kl-loss", "--use-unbiased-kl", "--kl-loss-type", "k2"],
         r"--kl-loss-type=k2: the mean of k2 is not the KL"),
        (["--use-kl-loss", "--use-rs", "--rejected-in-kl", "--no-rejected-in-denominator"],
         r"--rejected-in-kl=True: with --no-rejected-in-denominator"),
        (["--use-rs", "--rejected-in-kl"], r"--rejected-in-kl=True: only --use-kl-loss reads it"),
        (["--rs-statistic", "k3", "--rs-upper-bound", "1"], r"--rs-statistic=k3: only --use-rs"),
        (K3, r"--rs-upper-bound=None: --rs-statistic k3 needs it"),
        ([*K3, "--rs-upper-bound", "1", "--rs-lower-bound", "0.1"],
         r"--rs-lower-bound=0.1: --rs-statistic k3 grows on both sides"),
        (["--use-rs", "--rs-lower-bound", "3"],
         r"--rs-lower-bound=3.0: rejection would keep from 3 to 2, by the weights' bounds"),
        (["--mismatch-governor", "--tis-upper-bound", "0.5"],
         r"--rs-lower-bound=None: rejection would keep from 2 to 0.5"),
        (["--use-tis", "--tis-mode", "clip", "--tis-upper-bound", "0.5"],
         r"--tis-upper-bound=0.5: --tis-mode clip bounds below by 1 / --tis-upper-bound = 2"),
        (["--rs-veto-by", "rollout_probability"],
         r"--rs-veto-by=rollout_probability: only --rs-veto-threshold reads it"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_with_the_true_reason(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        BYPASS,
        [*BYPASS, "--use-rs"],
        [*BYPASS, "--rs-veto-threshold", "1e-4", "--policy-loss", "gspo"],
        [*REINFORCE, "--use-tis"],
        [*REINFORCE, "--use-rs"],
        [*REINFORCE, "--true-on-policy-mode"],
        [*BYPASS, "--custom-tis-function-path", "a.b", "--use-tis", "--tis-batch-normalize"],
        [*REINFORCE, "--use-tis", "--true-on-policy-mode", "--parity-policy", "fallback"],
        [*K3, "--rs-upper-bound", "0.01"],
        ["--mismatch-governor", "--rs-statistic", "k2", "--rs-upper-bound", "0.01"],
        ["--rs-veto-threshold", "1e-6", "--rs-veto-by", "rollout_probability"],
        ["--use-kl-loss", "--use-unbiased-kl", "--kl-loss-type", "low_var_kl"],
        ["--use-kl-loss", "--use-rs", "--rejected-in-kl"],
    ],
)
def test_what_means_something_runs(argv):
    check(*argv)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_estimators_of_peers_scripts_are_accepted(kind):
    check("--use-kl-loss", "--kl-loss-type", kind)
