"""What `onpolicy explain` takes of a cluster's flags."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import validate
from onpolicy.config.tool_flags import ExplainConfig

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
