"""What `onpolicy explain` takes of a cluster's flags."""

import pytest

from onpolicy.cli import explain
from onpolicy.cli.parse import parse
from onpolicy.config.tools import ExplainConfig
from onpolicy.errors import ConfigError

TWO_RANKS = ("--actor-num-ranks-per-node", "2")


def check(*argv):
    explain._validate(parse(ExplainConfig, ["--hf-checkpoint", "/m", *argv], "onpolicy explain"))


@pytest.mark.parametrize(
    "argv",
    [
        TWO_RANKS,
        ("--actor-num-gpus-per-node", "2"),
        (*TWO_RANKS, "--train-backend", "megatron"),
        (*TWO_RANKS, "--train-backend", "megatron", "--megatron-pp", "2"),
        ("--ray-address", "10.0.0.1:6379", "--actor-num-nodes", "2"),
    ],
    ids=["ranks", "GPUs", "megatron", "pipeline", "cluster"],
)
def test_ranks_that_compute_whole_rows_are_taken_on_any_hosts(argv):
    check(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--attribution", "kinds", "--ray-address", "h:1"),
            "--ray-address=h:1 with --attribution: ",
        ),
        (("--attribution", "kinds", "--actor-num-nodes", "2"), "nodes=2 with --attribution: its"),
        ((*TWO_RANKS, "--attribution", "layers"), "node=2 with --attribution: its trainer has one"),
        (("--train-backend", "megatron", "--megatron-tp", "2"), "--megatron-tp=2: .* whole rows"),
    ],
    ids=["cluster", "nodes", "attribution", "tensor-parallel"],
)
def test_what_is_not_recorded_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        check(*argv)
