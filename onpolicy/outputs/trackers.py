"""Trackers, the libraries of others that a run logs its metrics to beside metrics.jsonl.

None of them holds up a run or ends it: each is opened, called and closed in a thread of its own. All
write into the run directory without a network, unless the environment names a server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar

import psutil

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.outputs.metrics import Sink

logger = logging.getLogger(__name__)

END_SECONDS = 30.0

FINISH_SECONDS = 120
"""Seconds for unsent data at the end of a run; it stays in the run directory."""

HANG_SECONDS = 60.0
"""Seconds after which a call that has not returned is reported. What follows waits for it."""


class Tracker(ABC):
    """A library that is open for one run, in `directory`. Any of its methods may raise or hang."""

    name: ClassVar[str]
    """The name of the flag and of the package."""

    recovers: ClassVar[bool] = True
    """Whether it is called again after a call that failed."""

    def __init__(self, directory: Path, config: Mapping[str, Any]):
        self.directory = directory
        self.open(config)

    @abstractmethod
    def open(self, config: Mapping[str, Any]) -> None:
        """Open the run, or the one that `run_id` continues."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Finish writing; `failed`: the run ended with an error."""

    @classmethod
    def check(cls) -> None:
        """Raise ConfigError if the package is not installed; import nothing."""
        if importlib.util.find_spec(cls.name) is None:
            raise ConfigError(
                f"--use-{cls.name}: {cls.name} is not installed. Install it: pip install {cls.name}; "
                "or leave the flag out."
            )

    @classmethod
    def abandon(cls) -> None:
        """Leave nothing of it that the end of the process would wait for."""

    def run_id(self, opened: Callable[[str | None], str]) -> None:
        """Call `opened` with the id of the run to continue, or None, and record the one it returns."""
        file = self.directory / f"{self.name}_run_id"
        file.write_text(f"{opened(file.read_text().strip() if file.exists() else None)}\n")


class TensorBoard(Tracker):
    name = "tensorboard"

    def open(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.directory / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Trackio(Tracker):
    name = "trackio"

    def open(self, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((self.directory / "trackio").absolute()))
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "onpolicy")
        names = {"project": project, "name": self.directory.absolute().name, "resume": "allow"}
        self._run = trackio.init(**names, config=dict(config), embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class Mlflow(Tracker):
    name = "mlflow"

    def open(self, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        here = f"sqlite:///{(self.directory / 'mlflow.db').absolute()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", here))
        self.run_id(self._started)
        params = [Param(name, str(value)[:6000]) for name, value in config.items()]  # its limit
        for first in range(0, len(params), 100):  # in a call, its limit too
            self._client.log_batch(self._id, params=params[first : first + 100])

    def _started(self, earlier: str | None) -> str:
        if earlier is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "onpolicy")
            found = self._client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            earlier = self._client.create_run(experiment).info.run_id
        self._id: str = earlier
        self._client.set_terminated(self._id, "RUNNING")
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics, with names that MLflow takes: eval/avg@8 is eval/avg_at_8."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        names = {name: re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_")) for name in metrics}
        self._client.log_batch(
            self._id, [Metric(names[name], value, now, step) for name, value in metrics.items()]
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Swanlab(Tracker):
    name = "swanlab"

    def open(self, config: Mapping[str, Any]) -> None:
        self.run_id(lambda earlier: self._started(earlier, config))

    def _started(self, earlier: str | None, config: Mapping[str, Any]) -> str:
        import swanlab

        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", "onpolicy"),
            mode=os.environ.get("SWANLAB_MODE", "offline"),
            log_dir=str(self.directory / "swanlab"),
            id=earlier,
            resume="allow",
            config=dict(config),
        )
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")


SERVICE = "wandb-core"
"""The name of wandb's service among a process's children."""


class Wandb(Tracker):
    """A run of Weights & Biases. After a resume, steps that had been logged before the run was cut
    short come again, with the same values but for times; Weights & Biases keeps the first ones."""

    name = "wandb"
    recovers = False

    def open(self, config: Mapping[str, Any]) -> None:
        self.run_id(lambda earlier: self._started(earlier, config))

    def _started(self, earlier: str | None, config: Mapping[str, Any]) -> str:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "onpolicy"),
            id=earlier,
            resume="allow",
            dir=str(self.directory),
            config=dict(config),
            settings=wandb.Settings(finish_timeout=FINISH_SECONDS, finish_timeout_raises=True),
        )
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    @classmethod
    def check(cls) -> None:
        """Have a run that cannot log there log into its directory, and say so. Asks a person at a
        terminal for a key. Accepts WANDB_MODE=offline or disabled. Raises ConfigError if wandb is
        not installed."""
        super().check()
        import wandb

        try:
            if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
                wandb.login(verify=True)
        except (wandb.Error, ValueError, OSError) as error:
            _log_offline(f"--use-wandb: {_reason(error)}")
            cls.abandon()  # its service has read WANDB_MODE

    @classmethod
    def abandon(cls) -> None:
        """End wandb's service now, and kill it if it hangs: at the end of a process wandb prints a
        traceback of a broken service, and waits for one that hangs."""
        ending = threading.Thread(target=_teardown, daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):  # it may end in between
                    if child.name() == SERVICE:
                        child.kill()


def _teardown() -> None:
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits with the code of a failed service
        wandb.teardown()


def _reason(error: Exception) -> str:
    """Return the reason for a failed connection; an unknown mode is one of wandb's ValueErrors."""
    mode = os.environ.get("WANDB_MODE")
    if isinstance(error, ValueError) and mode is not None:
        return f"WANDB_MODE={mode} is no mode of wandb (online, offline, disabled)."
    return in_one_line(error)


def _log_offline(reason: str) -> None:
    remedy = (
        "Run `wandb login`, or set WANDB_API_KEY; set WANDB_MODE=offline to log into the run directory, "
        "for `wandb sync` later."
    )
    logger.warning(
        "%s The run logs into its directory, as with WANDB_MODE=offline. %s", reason, remedy
    )
    os.environ["WANDB_MODE"] = "offline"


def trackers(output: OutputConfig) -> list[type[Tracker]]:
    """Return the kinds of trackers that the flags ask for."""
    asked: dict[type[Tracker], bool] = {
        TensorBoard: output.use_tensorboard,
        Wandb: output.use_wandb,
        Trackio: output.use_trackio,
        Mlflow: output.use_mlflow,
        Swanlab: output.use_swanlab,
    }
    return [kind for kind, is_asked in asked.items() if is_asked]


class TrackerSink(Sink):
    """A sink that calls a tracker in a thread, in order. Of what fails or hangs there it says the
    first, and the run goes on."""

    def __init__(self, kind: type[Tracker], directory: Path, config: Mapping[str, Any]):
        self._kind = kind
        self._open = lambda: kind(directory, config)
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        self._has_warned = False
        self._begun: float | None = None
        self._thread = threading.Thread(target=self._work, name=kind.name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._thread.is_alive():
            if self._begun and time.monotonic() - self._begun > HANG_SECONDS:
                self._warn(f"has not answered for {HANG_SECONDS:.0f} seconds")
            kept = dict(metrics)
            self._calls.put(lambda tracker: tracker.log(step, kept))

    def close(self, failed: bool = False) -> None:
        """Wait for at most FINISH_SECONDS until all is written."""
        self._calls.put(lambda tracker: tracker.close(failed))
        self._calls.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._warn(f"did not finish within {FINISH_SECONDS} seconds")
            self._kind.abandon()

    def _work(self) -> None:
        tracker = self._attempt(self._open)
        while tracker is not None and (call := self._calls.get()) is not None:
            if not self._attempt(lambda: (call(tracker),)) and not tracker.recovers:
                break
        if self._has_warned:
            self._kind.abandon()

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`, or None if it fails."""
        self._begun = time.monotonic()
        try:
            return call()
        except (
            Exception,
            SystemExit,
        ) as error:  # of services, networks, disks: all are wrapped by few
            self._warn(f"failed ({type(error).__name__}: {in_one_line(error)})")
            return None
        finally:
            self._begun = None

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "--use-%s: %s. The run goes on, with a gap there or without it; all metrics are in "
                "metrics.jsonl.", self._kind.name, what,
            )  # fmt: skip
