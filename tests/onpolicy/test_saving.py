"""Checkpoints on disk: complete or not there."""

import dataclasses
import resource

import pytest

from onpolicy import saving
from onpolicy.config import TrainConfig, groups
from onpolicy.engines import EnginePair
from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.models.checkpoint import load_config
from onpolicy.start import make_contract
from onpolicy.train import distributed, make_trainer


@pytest.fixture
def run(checkpoint, tmp_path):
    """A configuration that saves under tmp_path, and engines whose server is not started."""
    distributed.init_process_group()
    save = str(tmp_path / "save")
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        rollout=groups.RolloutConfig(num_rollout=9),
        output=groups.OutputConfig(save=save, save_interval=2, load=save),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    hf_config = load_config(str(checkpoint))
    contract = make_contract(str(checkpoint), hf_config, dtype="float32", aligned=True)
    engines = EnginePair(config, hf_config, contract, tmp_path)
    engines.trainer = make_trainer(config, contract, 1)
    return config, engines


@pytest.fixture
def full_disk():
    """The system refuses files over some bytes, as a full disk would, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [100, 30_000, 450_000])
def test_a_full_disk_at_save_keeps_the_earlier_checkpoint_and_says_what_to_do(run, full_disk, size):
    config, engines = run
    saving.save(config, engines, 2, "hash")
    with pytest.raises(CheckpointError, match=r"after rollout 4 could not .*step_000002.*--load"):
        full_disk(size)
        saving.save(config, engines, 4, "hash")
    found = saving.find(config)
    assert found.rollouts_done == 2
    engines.trainer.load(found.directory)


def test_when_there_is_space_again_the_same_checkpoint_can_be_written(run, full_disk):
    config, engines = run
    with pytest.raises(CheckpointError):
        full_disk(100)
        saving.save(config, engines, 2, "hash")
    full_disk(resource.RLIM_INFINITY)
    saving.save(config, engines, 2, "hash")
    assert saving.find(config).rollouts_done == 2


def test_a_resumed_run_keeps_its_seed(run):
    config, engines = run
    saving.save(config, engines, 2, "hash")
    with pytest.raises(ConfigError, match=r"--seed=1: .* was made with --seed=0"):
        saving.find(dataclasses.replace(config, seed=1))
