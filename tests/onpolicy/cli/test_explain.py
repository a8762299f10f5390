"""What `onpolicy explain` takes of a cluster's flags."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.explain import ExplainConfig
from onpolicy.errors import ConfigError

TWO_RANKS = ("--actor-num-ranks-per-node", "2")


def check(*argv):
    validate(parse(ExplainConfig, ["--hf-checkpoint", "/m", *argv], "onpolicy explain"))


@pytest.mark.parametrize(
    "argv",
    [
        TWO_RANKS,
        ("--actor-num-gpus-per-node", "2"),
        (*TWO_RANKS, "--train-backend", "megatron"),
        (*TWO_RANKS, "--train-backend", "megatron", "--megatron-pp", "2"),
        (*TWO_RANKS, "--train-backend", "megatron", "--megatron-tp", "2"),
        (*TWO_RANKS, "--train-backend", "megatron", "--megatron-cp", "2"),
        (*TWO_RANKS, "--train-backend", "megatron", "--megatron-ep", "2"),
        ("--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2"),
    ],
    ids=["ranks", "GPUs", "megatron", "pipeline", "tensor", "context", "expert", "cluster"],
)
def test_ranks_are_taken_however_they_share_the_model_and_on_any_hosts(argv):
    check(*argv)


@pytest.mark.parametrize(
    "argv", [(), ("--train-backend", "megatron"), TWO_RANKS, ("--sglang-tp-size", "2")]
)
def test_operators_share_the_mismatch_of_any_engines(argv):
    check("--attribution", "operators", "--no-true-on-policy-mode", *argv)


@pytest.mark.parametrize("attribution", ["kinds", "layers", "operators"])
def test_an_attribution_is_made_on_any_hosts_too(attribution):
    check("--attribution", attribution, "--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2")


@pytest.mark.parametrize("attribution", ["kinds", "layers", "operators"])
def test_an_attribution_of_one_prompt_is_refused(attribution):
    with pytest.raises(ConfigError, match=r"--num-prompts=1 with --attribution=.*several prompts"):
        check("--attribution", attribution, "--num-prompts", "1")


@pytest.mark.parametrize("attribution", ["kinds", "layers", "operators"])
def test_an_attribution_beside_adapters_is_refused(attribution):
    with pytest.raises(ConfigError, match=r"--lora-rank=4"):
        check("--attribution", attribution, "--lora-rank", "4")


@pytest.mark.parametrize("attribution", ["kinds", "layers"])
def test_orders_are_of_parts_that_are_aligned_one_after_another(attribution):
    check("--attribution", attribution, "--orders", "2")
    for others in ((), ("--attribution", "operators")):
        with pytest.raises(ConfigError, match=r"--orders=2: only --attribution kinds or layers"):
            check("--orders", "2", *others)


def test_one_order_is_refused_since_it_tells_no_error():
    with pytest.raises(ConfigError, match=r"--orders=1: one order tells no error\. Give 2"):
        check("--attribution", "kinds", "--orders", "1")


def test_an_attribution_of_what_cannot_be_aligned_in_part_is_refused():
    with pytest.raises(
        ConfigError, match=r"--train-backend=megatron with --attribution=kinds: only"
    ):
        check("--attribution", "kinds", "--train-backend", "megatron")


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (("--case", "c.json"), "an interval needs"),
        (("--align", "norm", "--no-true-on-policy-mode"), "the aligned kinds alone"),
    ],
)
def test_operators_share_the_mismatch_of_a_rollout_as_it_is(argv, rule):
    check("--attribution", "operators")
    with pytest.raises(ConfigError, match=rule):
        check("--attribution", "operators", *argv)
