"""What `onpolicy explain` takes of a cluster's flags."""

import pytest

from onpolicy.cli import explain
from onpolicy.cli.parse import parse
from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError

TWO_RANKS = ("--actor-num-ranks-per-node", "2")


def check(*argv):
    explain._validate(parse(ExplainConfig, ["--hf-checkpoint", "/m", *argv], "onpolicy explain"))


def test_several_ranks_of_fsdp_on_this_host_are_taken():
    check(*TWO_RANKS)
    check("--actor-num-gpus-per-node", "2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ray-address", "10.0.0.1:6379"), "--ray-address, --actor-num-nodes: .* of this host"),
        (("--actor-num-nodes", "2"), "--ray-address, --actor-num-nodes: .* of this host"),
        ((*TWO_RANKS, "--train-backend", "megatron"), "node=2: with --train-backend=megatron"),
        ((*TWO_RANKS, "--attribution", "layers"), "node=2: with --attribution explain"),
        (("--train-backend", "megatron", "--megatron-tp", "2"), "--megatron-tp=2: .* whole rows"),
    ],
    ids=["cluster", "nodes", "megatron", "attribution", "tensor-parallel"],
)
def test_what_is_not_recorded_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)
