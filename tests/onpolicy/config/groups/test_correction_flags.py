"""Which corrections run together, and the reason where they do not."""

import re

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.config.sft_flags import SftConfig
from onpolicy.errors import ConfigError

GOOD = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
BYPASS = ["--use-rollout-logprobs"]
REINFORCE = [*BYPASS, "--policy-loss", "reinforce"]
LAG = ["--rollout-lag", "1"]
TRM = ["--use-rs", "--rs-rules", "seq_max_kl=0.1"]
FREE = ["--rollout-schedule", "free"]


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
         r"--tis-batch-normalize=True: .*before the global batch is known"),
        ([*REINFORCE, "--use-rs", "--no-rejected-in-denominator"],
         r"--rejected-in-denominator=False: .*before the global batch is known"),
        ([*BYPASS, "--dc-mode", "fixed"], r"--dc-mode=fixed: .*pi_train is not known before the loss"),
        (["--use-rs", "--rs-lower-bound", "3"],
         r"--rs-lower-bound=3.0: rejection would keep from 3 to 2, by the weights' bounds"),
        (["--mismatch-governor", "--tis-upper-bound", "0.5"],
         r"--rs-lower-bound=None: rejection would keep from 2 to 0.5"),
        (["--use-tis", "--tis-mode", "clip", "--tis-upper-bound", "0.5"],
         r"--tis-upper-bound=0.5: --tis-mode clip bounds below by 1 / --tis-upper-bound = 2"),
        (["--use-rs", "--rs-rules", "token_k3=0.1", "--rs-level", "sequence"],
         r"--rs-rules=token_k3=0.1: it says all that is rejected by, and --rs-level would do nothing"),
        ([*TRM, "--advantage-estimator", "otb"], r"seq_max_kl and --advantage-estimator otb each take"),
        ([*TRM, "--train-backend", "megatron", "--megatron-pp", "2"],
         r"--rs-rules=seq_max_kl=0.1: with --megatron-pp=2 only the last stage knows"),
        ([*TRM, "--rollout-top-p", "0.9"], r"seq_max_kl needs the policy that tokens are drawn from"),
        (["--use-rs", "--rs-rules", "seq_max_k3=0.1", "--opd-top-k", "9"],
         r"--opd-top-k=9: only --opd-loss=top-k, --policy-loss=centered or --rs-rules seq_max_kl reads"),
        (["--rs-rules", "token_k3=0.1"], r"--rs-rules=token_k3=0.1: only --use-rs reads it"),
        (["--use-rs", "--rs-rules", "k3=0.1"],
         r"--rs-rules=k3=0.1: no such metric\. Use one of token_k1"),
        (["--rollout-lag", "4", "--num-rollout", "4"],
         r"--rollout-lag=4: with --num-rollout=4 all samples would be .*\. Give at most 3"),
        ([*LAG, "--colocate"], r"--rollout-lag=1: with --colocate the servers give their memory back"),
        ([*LAG, "--true-on-policy-mode", "--parity-policy", "fallback", "--use-tis"],
         r"--rollout-lag=1: .*corrected in any case"),
        ([*LAG, *REINFORCE, "--true-on-policy-mode"],
         r"--policy-loss=reinforce: with --use-rollout-logprobs nothing would correct"),
        ([*LAG, *BYPASS, "--tis-level", "sequence"], r"--tis-level=sequence: only --use-tis reads it"),
        ([*LAG, "--true-on-policy-mode", "--tis-upper-bound", "5"],
         r"--tis-upper-bound=5.0: only --use-tis, .* reads it"),
        ([*LAG, "--tis-mode", "clip", "--tis-upper-bound", "0.5"],
         r"--tis-upper-bound=0.5: --tis-mode clip bounds below"),
        (["--dynamic-sampling", "--filter-equal-rewards"],
         r"--dynamic-sampling=True: draws others for the groups"),
        (["--dynamic-sampling", "--n-samples-per-prompt", "1", "--advantage-estimator", "reinforce"],
         r"--dynamic-sampling=True: the rewards of a group of --n-samples-per-prompt=1 are always"),
        ([*LAG, "--over-sampling-batch-size", "2"],
         r"--over-sampling-batch-size=2: only --dynamic-sampling or --rollout-schedule free"),
        ([*FREE, *LAG], r"--rollout-lag=1: with --rollout-schedule free the clock decides"),
        ([*FREE, "--dynamic-sampling"], r"--dynamic-sampling=True: draws groups in the place of others"),
        ([*FREE, "--colocate"], r"--colocate=True: servers give their memory back .*schedule free"),
        ([*FREE, "--mismatch-governor"], r"--mismatch-governor=True: it starts servers .*free they"),
        ([*FREE, "--true-on-policy-mode", "--parity-policy", "fallback", "--use-tis"],
         r"--rollout-schedule=free: .*corrected in any case"),
        ([*FREE, "--replay", "j"], r"--replay=j: without --true-on-policy-mode a token depends on the"),
        (["--replay", "j"], r"--replay=j: only --rollout-schedule free reads it"),
        ([*LAG, "--max-staleness", "3"], r"--max-staleness=3: only --rollout-schedule free reads it"),
        ([*FREE, "--max-staleness", "0"], r"--max-staleness=0: must be at least 1"),
        (["--custom-loss-path", "a.b", "--policy-loss", "gspo"],
         r"--custom-loss-path=a.b: it and --policy-loss=gspo are two objectives"),
        (["--custom-loss-path", "a.b", "--eps-clip", "0.1"], r"--eps-clip=0.1: only --policy-loss ppo"),
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
        ["--mismatch-governor", "--rs-rules", "seq_mean_k2=0.01"],
        [*TRM, "--opd-top-k", "9", *BYPASS],
        [*LAG, "--true-on-policy-mode", *TRM, "--rollout-top-p", "0.9"],
        [*REINFORCE, "--use-tis", "--tis-level", "prefix-min", "--tis-mode", "clip"],
        [*LAG, "--true-on-policy-mode", "--use-tis", "--tis-level", "sequence"],
        [*LAG, "--true-on-policy-mode", "--use-tis", "--tis-upper-bound", "5"],
        [*LAG, "--true-on-policy-mode", *BYPASS],
        [
            *FREE, "--max-staleness", "8", "--over-sampling-batch-size", "40", "--tis-upper-bound",
            "5",
        ],
        [*FREE, "--true-on-policy-mode", "--replay", "j", "--allow-changed-settings", "lr"],
        ["--dynamic-sampling", "--over-sampling-batch-size", "7"],
    ],
)  # fmt: skip
def test_what_means_something_runs(argv):
    check(*argv)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_kl_estimators_of_peers_scripts_are_accepted(kind):
    check("--use-kl-loss", "--kl-loss-type", kind)


CENTERED = ["--policy-loss", "centered"]
LAGS = ["--true-on-policy-mode", "--rollout-lag", "1"]
GOVERNED = ["--mismatch-governor", "--rs-level", "sequence"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--true-on-policy-mode"], "one policy, whose scores have the mean 0"),
        (["--use-tis", "--tis-level", "turn"], "--tis-level=turn depends on more than that"),
        (["--use-tis", "--tis-mode", "taper"], "--tis-mode=taper depends on more"),
        (["--use-tis", "--tis-batch-normalize"], "--tis-batch-normalize depends on more"),
        (["--use-rs"], "--use-rs by tokens depends on more"),
        (["--use-rs", "--rs-rules", "token_binary_kl=0.1"], "--use-rs by tokens depends on more"),
        (
            ["--mismatch-governor"],
            "--governor-highest=tis, which rejects by tokens, depends on more",
        ),
        ([*GOVERNED, "--rollout-top-p", "0.9"], "an engine without --true-on-policy-mode"),
        (
            [*GOVERNED, *LAGS[:1], "--rollout-top-p", "0.9"],
            "an engine without --true-on-policy-mode",
        ),
        (["--custom-tis-function-path", "a.b"], "--custom-tis-function-path depends on more"),
        (["--use-tis", "--global-batch-size", "8"], "weights at later optimizer steps"),
        ([*LAGS, "--global-batch-size", "8"], "weights at later optimizer steps"),
        (["--rollout-top-p", "0.9"], "an engine without --true-on-policy-mode returns another"),
    ],
)
def test_what_centering_cannot_take_the_mean_of_is_refused(argv, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(*[*CENTERED, *argv])
    check(*["--policy-loss", "reinforce", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--use-tis", "--tis-mode", "mask"],
        ["--use-rs", "--rs-rules", "seq_mean_k3=0.1"],
        ["--global-batch-size", "8"],
        [*BYPASS, "--use-tis", "--global-batch-size", "8"],
        [*LAGS, "--rollout-top-p", "0.9"],
        GOVERNED,
        [*GOVERNED, *LAGS[:1], "--use-tis", "--tis-upper-bound", "3"],
        ["--mismatch-governor", "--governor-highest", "tis"],
    ],
)
def test_centering_stands_beside_the_rest(argv):
    check(*[*CENTERED, *argv, "--opd-top-k", "8"])


def test_a_rate_by_the_weights_needs_weights():
    ess = ["--lr-schedule", "ess"]
    for argv in ([], LAGS, ["--use-rs"]):
        with pytest.raises(ConfigError, match="--lr-schedule=ess: there are no importance weights"):
            check(*[*ess, *argv])
    for argv in (["--use-tis"], [*LAGS, "--policy-loss", "reinforce"], ["--mismatch-governor"]):
        check(*[*ess, *argv])
    sft = parse(SftConfig, [*GOOD[:4], "--save", "/s", *ess], "onpolicy sft")
    with pytest.raises(ConfigError, match="only `onpolicy train` reads it"):
        validate(sft)
