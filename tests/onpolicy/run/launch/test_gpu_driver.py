"""A driver that is too old for PyTorch's CUDA is said as that, and any other way without GPUs is not."""

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch import gpu_driver
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.gpu_driver import device_of, old_driver

CLOSED = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Jan 22 14:51:52 UTC 2024
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@node)
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Installs a kernel module of this version under a PyTorch of this CUDA."""

    def install(version, cuda="13.0", text=CLOSED):
        (tmp_path / "version").write_text(text.format(version))
        monkeypatch.setattr(torch.version, "cuda", cuda)

    monkeypatch.setattr(gpu_driver, "VERSION", tmp_path / "version")
    gpu_driver._warn.cache_clear()
    return install


def train(**changes):
    return TrainConfig(parity=groups.ParityConfig(true_on_policy_mode=True), **changes)


def hopper():
    return groups.OperatorsConfig(operators="hopper")


@pytest.mark.parametrize("text", [CLOSED, OPEN])
@pytest.mark.parametrize("version", ["535.161.08", "570.86.15", "570.211.01"])
def test_both_kinds_of_module_tell_their_version(driver, text, version):
    """Drivers of CUDA 12 under a PyTorch for CUDA 13 (pytorch pull request 162531)."""
    driver(version, text=text)
    assert f"driver={version} is too old for PyTorch's CUDA 13.0" in old_driver()
    assert "580 or newer is needed" in old_driver() and "`make setup`" in old_driver()


@pytest.mark.parametrize(
    ("version", "cuda"),
    [("580.65.06", "13.0"), ("610.1", "13.4"), ("535.161.08", "12.8"), ("535.161.08", None),
     ("535.161.08", "14.0"), ("none", "13.0")],
)  # fmt: skip
def test_other_reasons_for_no_gpu_are_not_laid_on_the_driver(driver, version, cuda):
    """Hidden GPUs, a build for CPUs, a CUDA that nobody knows yet, a file in another form."""
    driver(version, cuda)
    assert old_driver() == "" and device_of(train(operators=hopper())) == "cpu"


def test_without_a_driver_there_is_nothing_to_say(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert old_driver() == ""


@pytest.mark.parametrize(
    ("flag", "config"),
    [
        ("--operators=hopper", train(operators=hopper())),
        ("--operators=hopper", ServeConfig(operators=hopper())),
        ("--colocate", train(engine=groups.EngineConfig(colocate=True))),
        ("--actor-num-gpus-per-node=8",
         train(cluster=groups.ClusterConfig(actor_num_gpus_per_node=8))),
    ],
)  # fmt: skip
def test_who_asks_for_gpus_is_refused_with_the_drivers_version(driver, flag, config):
    driver("535.161.08")
    with pytest.raises(ConfigError, match=rf"^{flag}: NVIDIA's driver=535.161.08 is too old"):
        device_of(config)


def test_who_asks_for_none_is_warned_once_that_the_cpu_computes(driver, caplog, checkpoint):
    """SGLang issue 11395: a server went on on the CPU, and only PyTorch's warning said why."""
    driver("535.161.08")
    config = train(model=groups.ModelConfig(hf_checkpoint=str(checkpoint)))
    for aligned in (True, False):
        made = contract_for(config, load_config(str(checkpoint)), aligned=aligned)
        assert made.device == "cpu"
    (said,) = [x for x in caplog.messages if "driver" in x]
    assert said.startswith("computing on the CPU: NVIDIA's driver=535.161.08")
    caplog.clear()
    device_of(train(operators=groups.OperatorsConfig(operators="cpu")))
    assert not caplog.messages
