"""The flags of adapters: what is refused beside them, and what reads them."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config.groups import LoraConfig
from onpolicy.config.rules import validate
from onpolicy.config.tool_flags import ExplainConfig, VerifyConfig
from onpolicy.errors import ConfigError
from tests.onpolicy.config.test_validate import MODE, check

LORA = ["--lora-rank", "8"]


def test_adapters_are_for_aligned_runs_and_stock_ones():
    check(*MODE, *LORA, "--lora-alpha", "16", "--lora-rslora", "--lora-target-modules", "q_proj")
    check(*MODE, *LORA, "--rollout-weight-format", "int4")
    check(*MODE, *LORA, "--train-backend", "megatron")
    check(*MODE, *LORA, "--sglang-tp-size", "2", "--row-parallel-blocks", "4")
    check(*LORA, "--use-tis")
    check(*LORA, "--mismatch-governor")
    check(*MODE, *LORA, "--mismatch-governor", "--train-backend", "megatron")
    check(*LORA, "--train-backend", "megatron")
    check(*LORA, "--rollout-server-url", "http://127.0.0.1:1")


INT4 = ["--rollout-weight-format", "int4"]
SERVER = ["--rollout-server-url", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (INT4, "most of their update would be lost"),
        ([*MODE, "--mismatch-governor", *INT4], "most of their update"),
        ([*MODE, *SERVER], "were started without adapters"),
    ],
)
def test_what_cannot_have_adapters_is_refused_beside_them_alone(argv, rule):
    check(*argv)
    with pytest.raises(ConfigError, match=f"--lora-rank=8: .*{rule}"):
        check(*LORA, *argv)


@pytest.mark.parametrize("argv", [["--lora-alpha", "16"], ["--lora-rslora"]])
def test_without_adapters_nothing_reads_their_flags(argv):
    with pytest.raises(ConfigError, match="only --lora-rank reads it"):
        check(*MODE, *argv)


def test_verify_and_explain_take_them():
    validate(parse(VerifyConfig, LORA, "onpolicy verify"))
    validate(parse(VerifyConfig, [*LORA, "--no-true-on-policy-mode"], "onpolicy verify"))
    for argv in ([], ["--train-backend", "megatron"]):
        validate(parse(ExplainConfig, [*LORA, *argv], "onpolicy explain"))
    with pytest.raises(ConfigError, match="--lora-rank=8: servers that are not aligned have"):
        validate(parse(ExplainConfig, [*LORA, "--no-true-on-policy-mode"], "onpolicy explain"))


def test_the_scale_is_over_the_rank_or_over_its_root():
    assert LoraConfig(lora_rank=16, lora_alpha=24).scale == 1.5
    assert LoraConfig(lora_rank=16, lora_alpha=32, lora_rslora=True).scale == 8
