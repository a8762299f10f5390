"""What `bench loop` starts: the training engine that it was asked for, and one only."""

import pytest

from onpolicy.bench.input_checks import check_inputs
from onpolicy.bench.loop import started_run
from onpolicy.config import groups
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config


def loop(checkpoint, backend):
    model = groups.ModelConfig(hf_checkpoint=str(checkpoint))
    return BenchConfig(what="loop", model=model, train_backend=backend)


class Started(Exception):
    pass


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("kind", ["aligned", "stock"])
def test_the_asked_engine_trains(checkpoint, backend, kind):
    def make_engines(config, hf_config, contract, *args, **kwargs):
        assert config.trainer.train_backend == backend
        assert contract.is_aligned == (kind == "aligned")
        raise Started

    hf_config = load_config(str(checkpoint))
    with (
        pytest.raises(Started),
        started_run(loop(checkpoint, backend), hf_config, kind, make_engines),
    ):
        pass


def test_two_engines_at_once_are_refused(checkpoint):
    with pytest.raises(
        ConfigError, match=r"--train-backend=fsdp,megatron: .* Give fsdp or megatron"
    ):
        check_inputs(loop(checkpoint, "fsdp,megatron"))
