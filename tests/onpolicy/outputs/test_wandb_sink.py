"""Weights & Biases without a network: what is checked beforehand, what a run outlives, a resumed run."""

import dataclasses
import os
import re
import subprocess
import sys

import psutil
import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs import metrics
from onpolicy.outputs.directory import RunDirectory, check_sinks

OUTPUT = OutputConfig(use_wandb=True)


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


def ours(caplog):
    """What onpolicy said."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("onpolicy.")]


UNREACHABLE = {
    "no key": ({}, "No API key configured.*wandb login"),
    "an empty mode": ({"WANDB_MODE": ""}, "WANDB_MODE= is no mode of wandb"),
    "an unknown mode": ({"WANDB_MODE": "of"}, "WANDB_MODE=of is no mode of wandb"),
    "no network": (
        {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},  # nobody listens there
        "--use-wandb: .*127.0.0.1:9",
    ),
}


def test_a_service_that_hangs_is_killed_and_another_can_follow(nobody, tmp_path):
    """As one does now and then on a busy machine: wandb waits for it without a limit."""
    import wandb

    nobody.setenv("WANDB_MODE", "offline")
    wandb.setup().ensure_service()
    (service,) = (c for c in psutil.Process().children() if c.name() == metrics.SERVICE)
    service.suspend()
    nobody.setattr(metrics, "END_SECONDS", 0.5)
    metrics._end_service()
    service.wait(10)
    open_sink(tmp_path).close()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_run_that_cannot_be_logged_there_says_so_once_and_logs_into_its_directory(
    nobody, caplog, name, tmp_path
):
    variables, message = UNREACHABLE[name]
    for variable, value in variables.items():
        nobody.setenv(variable, value)
    if "WANDB_MODE" not in variables:
        nobody.setenv("WANDB_MODE", "online")
    check_sinks(OUTPUT)
    (warning,) = ours(caplog)
    assert re.search(f"{message}.*as with WANDB_MODE=offline", warning)
    assert os.environ["WANDB_MODE"] == "offline"
    sink = open_sink(tmp_path)
    sink.log(0, {"rollout/raw_reward": 0.5})
    sink.close()
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert ours(caplog) == [warning]


def open_sink(tmp_path, output=OUTPUT):
    config = dataclasses.replace(TrainConfig(), output=output)
    _, sink = RunDirectory(str(tmp_path / "run"), resumes=False).sinks(config, 0)
    return sink


PROGRAM = """
import resource, sys, time
from pathlib import Path
import psutil, wandb
from onpolicy.config.groups import OutputConfig
from onpolicy.outputs.metrics import WandbSink

_, directory, fault = sys.argv
if fault == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sink = WandbSink(OutputConfig(use_wandb=True), Path(directory), {})
if fault == "dead service":
    services = psutil.Process().children(recursive=True)
    assert services
    for service in services:
        service.kill()
for step in range(50):
    sink.log(step, {"x": 1.0})
    time.sleep(0.02)
sink.close()
print("went on")
"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [("full disk", "OSError: [Errno 27] File too large"), ("dead service", "Connection")],
)
def test_what_fails_there_is_said_once_and_ends_no_run(nobody, fault, says, tmp_path):
    """In a process of its own, which wandb's threads and the limit on its files go with."""
    nobody.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), fault]
    done = subprocess.run(command, capture_output=True, text=True)
    (said,) = re.findall(r"Weights & Biases failed \((.*?)\)[.,]", done.stderr)
    assert says in said
    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert "Traceback" not in done.stderr.partition("Weights & Biases failed")[2]


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
    nobody.setenv("WANDB_RUN_GROUP", "sums")
    nobody.setenv("WANDB_NAME", "first")
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
