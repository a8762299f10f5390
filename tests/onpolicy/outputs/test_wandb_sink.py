"""Weights & Biases without a network: what is checked beforehand, and that a resumed run goes on."""

import dataclasses
import sys

import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.directory import RunDirectory, check_sinks

OUTPUT = OutputConfig(use_wandb=True, wandb_group="sums", wandb_run_name="first")


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Nobody is logged in on this machine, and nobody sits at a terminal."""
    import wandb

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


def test_nobody_logged_in_is_noticed_before_anything_starts(nobody):
    with pytest.raises(ConfigError, match=r"^--use-wandb: .*wandb login.*WANDB_MODE=offline"):
        check_sinks(OUTPUT)


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_without_a_network_nobody_need_be_logged_in(nobody, mode):
    nobody.setenv("WANDB_MODE", mode)
    check_sinks(OUTPUT)


@pytest.mark.parametrize(
    ("flag", "package"),
    [("use_wandb", "wandb"), ("use_tensorboard", "torch.utils.tensorboard")],
)
def test_a_package_that_is_not_installed_is_named_with_the_remedy(monkeypatch, flag, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: .*pip install"):
        check_sinks(OutputConfig(**{flag: True}))


def test_nothing_is_imported_that_is_not_asked_for(monkeypatch):
    for package in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    check_sinks(OutputConfig())


def test_a_run_has_its_name_and_group_and_a_resumed_one_is_the_same_run(nobody, tmp_path):
    nobody.setenv("WANDB_MODE", "offline")
    config = dataclasses.replace(TrainConfig(), output=OUTPUT)
    ids = []
    for first_step in (0, 2):
        directory = RunDirectory(str(tmp_path / "run"), resumes=first_step > 0)
        _, sink = directory.sinks(config, first_step)
        run = sink._run
        assert (run.project, run.group, run.name) == ("onpolicy", "sums", "first")
        ids.append(run.id)
        sink.log(first_step, {"rollout/raw_reward": 0.5})
        sink.close()
    assert ids[0] == ids[1] == (tmp_path / "run" / "wandb_run_id").read_text().strip()
