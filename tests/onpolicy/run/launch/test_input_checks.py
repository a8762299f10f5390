"""What is judged before a run: the way of weights, their room, and lengths that nobody asked for."""

from collections import namedtuple
from types import SimpleNamespace

import pytest

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.config.tool_flags import ExplainConfig, VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch import input_checks
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.input_checks import MIB, fit_run, fit_verify, require_transport

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def require(checkpoint):
    def require(weight_sync, buffer=512):
        config = TrainConfig(
            model=groups.ModelConfig(hf_checkpoint=str(checkpoint)),
            sync=groups.WeightSyncConfig(weight_sync=weight_sync, update_weight_buffer_size=buffer),
        )
        require_transport(config, contract_for(config, load_config(str(checkpoint)), aligned=False))

    return require


def test_cuda_ipc_without_a_gpu_is_refused(require):
    with pytest.raises(ConfigError, match=r"--weight-sync=ipc: .*this machine has none.*tensor"):
        require("ipc")


@pytest.mark.parametrize("size", [512 * MIB, 64 * MIB, 1 * MIB])
def test_a_tiny_model_fits_the_smallest_container(require, monkeypatch, size):
    monkeypatch.setattr(input_checks.shutil, "disk_usage", lambda path: Usage(size, 0, size))
    require("tensor")


@pytest.mark.parametrize("sizes", [[300 * MIB, 300 * MIB, 100 * MIB]])
@pytest.mark.parametrize(
    ("buffer", "free", "message"),
    [
        (512, 513, None),
        (
            512, 64,
            r"up to 512 MiB .*--update-weight-buffer-size=512; the largest weight has 300\), and "
            r"/dev/shm has 64 MiB free of 64\. .*--shm-size=8g\), or choose --weight-sync disk",
        ),
        (512, 400, r"\(docker run --shm-size=8g\), lower --update-weight-buffer-size, or choose"),
        (4096, 701, None),
        (4096, 699, "up to 700 MiB"),
        (1, 301, None),
        (1, 299, "up to 300 MiB"),
    ],
)  # fmt: skip
def test_a_bucket_that_does_not_fit_shared_memory_is_refused(
    require, monkeypatch, sizes, buffer, free, message
):
    class Weight:
        def __init__(self, num_bytes):
            self.numel = lambda: num_bytes // 2

    stored = dict(enumerate(map(Weight, sizes)))
    reader = SimpleNamespace(shapes=lambda: stored)
    monkeypatch.setattr(input_checks, "CheckpointReader", lambda path: reader)
    usage = Usage(free * MIB, 0, free * MIB)
    monkeypatch.setattr(input_checks.shutil, "disk_usage", lambda path: usage)
    if message is None:
        return require("tensor", buffer)
    with pytest.raises(ConfigError, match=message):
        require("tensor", buffer)
    require("disk", buffer)


@pytest.fixture
def of_context(checkpoint, monkeypatch):
    """Sets the context of the model."""

    def set_context(context):
        hf_config = load_config(str(checkpoint))
        hf_config.max_position_embeddings = context
        monkeypatch.setattr(input_checks, "load_config", lambda *_: hf_config)

    return set_context


def test_a_runs_responses_leave_half_of_the_context_to_prompts(of_context):
    def response_len(context, *argv):
        of_context(context)
        return fit_run(parse(TrainConfig, argv, "x")).rollout.rollout_max_response_len

    assert response_len(2048) == 1024
    assert response_len(128) == 64
    assert response_len(128, "--rollout-max-response-len", "1024") == 1024


def test_one_from_a_file_was_asked_for(of_context, tmp_path):
    of_context(128)
    (file := tmp_path / "run.yaml").write_text("rollout_max_response_len: 1024\n")
    config = parse(TrainConfig, ["--custom-config-path", str(file)], "x")
    assert fit_run(config).rollout.rollout_max_response_len == 1024


@pytest.mark.parametrize(("config_class", "usual"), [(VerifyConfig, 64), (ExplainConfig, 24)])
def test_the_responses_of_verify_and_explain_do_too(of_context, config_class, usual):
    def new_tokens(context, *argv):
        of_context(context)
        return fit_verify(parse(config_class, argv, "x")).max_new_tokens

    assert new_tokens(256) == usual
    assert new_tokens(40) == 20
    assert new_tokens(40, "--max-new-tokens", str(usual)) == usual
