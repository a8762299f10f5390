"""Trackers without a network: what is checked beforehand, what a run outlives, a resumed run."""

import dataclasses
import importlib.util
import json
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time

import psutil
import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs import trackers
from onpolicy.outputs.directory import RunDirectory, check_sinks
from onpolicy.outputs.trackers import SERVICE, Tracker, TrackerSink, Wandb

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
    (service,) = (c for c in psutil.Process().children() if c.name() == SERVICE)
    service.suspend()
    nobody.setattr(trackers, "END_SECONDS", 0.5)
    Wandb.abandon()
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
from onpolicy.outputs.trackers import TensorBoard, TrackerSink, Wandb

_, directory, fault, name = sys.argv
if fault == "full disk":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
sink = TrackerSink({"wandb": Wandb, "tensorboard": TensorBoard}[name], Path(directory), {})
if fault == "dead service":
    while not (Path(directory) / "wandb_run_id").exists():
        time.sleep(0.02)
    services = psutil.Process().children(recursive=True)
    assert services
    for service in services:
        try:
            service.kill()
        except psutil.NoSuchProcess:  # it ended with the other
            pass
for step in range(50):
    sink.log(step, {"x": 1.0})
    time.sleep(0.02)
sink.close()
print("went on")
"""


@pytest.mark.parametrize(
    ("fault", "name", "says"),
    [
        ("full disk", "wandb", "OSError: [Errno 27] File too large"),
        ("full disk", "tensorboard", "OSError: [Errno 27] File too large"),
        ("dead service", "wandb", "Connection"),
    ],
)
def test_what_fails_there_is_said_once_and_ends_no_run(nobody, fault, name, says, tmp_path):
    """In a process of its own, which wandb's threads and the limit on its files go with. A crash of
    wandb halted training elsewhere (verl issue 4904)."""
    nobody.setenv("WANDB_MODE", "offline")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), fault, name]
    done = subprocess.run(command, capture_output=True, text=True)
    (said,) = re.findall(rf"--use-{name}: (.*?)\. The run goes on", done.stderr)
    assert says in said
    assert (done.returncode, done.stdout) == (0, "went on\n")
    if name != "tensorboard":  # whose own thread prints one
        assert "Traceback" not in done.stderr.partition(f"--use-{name}: failed")[2]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_without_a_network_nobody_need_be_logged_in(nobody, mode):
    nobody.setenv("WANDB_MODE", mode)
    check_sinks(OUTPUT)


PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_installed_is_named_with_the_remedy(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"--use-{package}: .*pip install {package}"):
        check_sinks(OutputConfig(**{f"use_{package}": True}))


def test_nothing_is_imported_that_is_not_asked_for(monkeypatch, tmp_path):
    for package in PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    check_sinks(OutputConfig())
    assert len(RunDirectory(str(tmp_path / "run"), resumes=False).sinks(TrainConfig(), 0)) == 1


def test_a_run_has_its_name_and_group_and_a_resumed_one_is_the_same_run(nobody, tmp_path):
    nobody.setenv("WANDB_MODE", "offline")
    nobody.setenv("WANDB_RUN_GROUP", "sums")
    nobody.setenv("WANDB_NAME", "first")
    config = dataclasses.replace(TrainConfig(), output=OUTPUT)
    ids = []
    for first_step in (0, 2):
        directory = RunDirectory(str(tmp_path / "run"), resumes=first_step > 0)
        _, sink = directory.sinks(config, first_step)
        runs = []
        sink._calls.put(lambda tracker, runs=runs: runs.append(tracker._run))
        sink.log(first_step, {"rollout/raw_reward": 0.5})
        sink.close()
        (run,) = runs
        assert (run.project, run.group, run.name) == ("onpolicy", "sums", "first")
        ids.append(run.id)
    assert ids[0] == ids[1] == (tmp_path / "run" / "wandb_run_id").read_text().strip()


class Faulty(Tracker):
    """A tracker that raises in two steps, as a server does that is away for a while, or hangs."""

    name = "faulty"
    hangs_in = None

    def open(self, config):
        self.steps, self.ended = [], None

    def log(self, step, metrics):
        if step == self.hangs_in:
            threading.Event().wait()
        if step in (1, 2) and self.hangs_in is None:
            raise ConnectionError("connection timed out")
        self.steps.append(step)

    def close(self, failed):
        self.ended = failed


class Hanging(Faulty):
    hangs_in = 1


def test_a_server_that_is_away_for_a_while_costs_a_gap_and_no_run(tmp_path, caplog):
    """An outage of a tracking server ended a run after 15 hours elsewhere (miles pull request 2571)."""
    opened = []
    sink = TrackerSink(Faulty, tmp_path, {})
    sink._calls.put(opened.append)
    for step in range(4):
        sink.log(step, {"x": 1.0})
    sink.close(failed=True)
    assert (opened[0].steps, opened[0].ended) == ([0, 3], True)
    (said,) = ours(caplog)
    assert "--use-faulty: failed (ConnectionError: connection timed out). The run goes on" in said


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    sink = TrackerSink(Hanging, tmp_path, {})
    for step in range(2):
        sink.log(step, {"x": 1.0})
    while not ours(caplog):
        sink.log(2, {"x": 1.0})
        time.sleep(0.02)
    sink.close()
    (said,) = ours(caplog)
    assert "--use-faulty: has not answered for" in said and sink._thread.is_alive()


def test_a_run_that_ends_with_an_error_is_not_said_to_have_finished(tmp_path, monkeypatch):
    """MLflow showed failed runs as running elsewhere (pytorch-lightning issue 12291)."""
    closed = []
    monkeypatch.setattr(Faulty, "close", lambda self, failed: closed.append(failed))
    monkeypatch.setattr("onpolicy.outputs.directory.trackers", lambda output: [Faulty])
    directory = RunDirectory(str(tmp_path / "run"), resumes=False)
    with pytest.raises(KeyboardInterrupt), directory.opened_sinks(TrainConfig(), 0):
        raise KeyboardInterrupt
    with directory.opened_sinks(TrainConfig(), 0):
        pass
    assert closed == [True, False]


METRICS = {"rollout/raw_reward": 0.5, "eval/aime/avg@8": 0.25, "train/kl": float("nan")}


def write_and_resume(name, tmp_path):
    """Logs steps 0 and 1 of a run, and step 2 after it was resumed."""
    output = OutputConfig(**{f"use_{name}": True})
    check_sinks(output)
    for first, last in ((0, 2), (2, 3)):
        directory = RunDirectory(str(tmp_path / "run"), resumes=first > 0)
        config = dataclasses.replace(TrainConfig(), output=output)
        with directory.opened_sinks(config, first) as (_, sink):
            for step in range(first, last):
                sink.log(step, METRICS)
    return directory.path


def test_trackio_has_the_metrics_in_the_run_directory(tmp_path, caplog, monkeypatch):
    if importlib.util.find_spec("trackio") is None:  # its import would read TRACKIO_DIR
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", "")  # to be as it was afterwards
    monkeypatch.delenv("TRACKIO_DIR")
    run = write_and_resume("trackio", tmp_path)
    (file,) = (run / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by step"
        ).fetchall()
    assert [row[:2] for row in rows] == [("run", 0), ("run", 1), ("run", 2)]
    assert json.loads(rows[2][2])["eval/aime/avg@8"] == 0.25 and ours(caplog) == []


def test_mlflow_has_the_metrics_under_names_that_it_takes(tmp_path, caplog, monkeypatch):
    """It refuses the @ of avg@8 (verl pull request 984)."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = write_and_resume("mlflow", tmp_path)
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs(["1"])
    history = client.get_metric_history(found.info.run_id, "eval/aime/avg_at_8")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.25), (2, 0.25)]
    assert found.info.status == "FINISHED" and found.data.params["seed"] and ours(caplog) == []
    client.create_run("1")
    with pytest.raises(mlflow.exceptions.MlflowException, match="Names may only contain"):
        client.log_metric(found.info.run_id, "eval/aime/avg@8", 0.25)


def test_swanlab_has_the_metrics_in_the_run_directory(tmp_path, caplog, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    run = write_and_resume("swanlab", tmp_path)
    files = [*(run / "swanlab").glob("run-*/*.swanlab")]
    identity = (run / "swanlab_run_id").read_text().strip()
    assert {file.stem for file in files} == {f"run-{identity}"} and ours(caplog) == []
    assert b"eval/aime/avg@8" in b"".join(file.read_bytes() for file in files)
