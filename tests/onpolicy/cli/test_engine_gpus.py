"""GPUs of engines, counted as slime and Miles count them."""

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.errors import ConfigError


def parsed(*argv):
    return parse(TrainConfig, argv, "onpolicy train")


@pytest.mark.parametrize(
    ("argv", "engines", "degree"),
    [
        (["--rollout-num-gpus", "4"], 4, 1),
        (["--rollout-num-gpus-per-engine", "2"], 1, 2),
        (["--rollout-num-gpus", "8", "--rollout-num-gpus-per-engine", "2"], 4, 2),
        (["--rollout-num-gpus", "8", "--sglang-tp-size", "4"], 2, 4),
    ],
)
def test_they_say_how_many_servers_there_are_and_of_what_degree(argv, engines, degree):
    config = parsed(*argv)
    assert config.engine.rollout_num_engines == engines
    assert tensor_parallel_size(config.sglang_args) == degree


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"],
         "--rollout-num-gpus=3: must be a multiple of --rollout-num-gpus-per-engine 2. Give 2"),
        (["--rollout-num-gpus-per-engine", "0"], "--rollout-num-gpus-per-engine=0: must be at least 1"),
        (["--rollout-num-gpus", "4", "--rollout-num-engines", "2"], "Leave one out"),
        (["--rollout-num-gpus-per-engine", "2", "--sglang-tp", "2"], "--sglang-tp-size says the same"),
    ],
)  # fmt: skip
def test_what_is_said_twice_or_leaves_gpus_over_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message):
        parsed(*argv)
