"""Metrics on Weights & Biases, which a run can do without: a failure there is logged once.

Without --wandb-required, a run that cannot reach Weights & Biases at its start logs into its own
directory, for `wandb sync`, and one that loses the connection goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError, OutputError, in_one_line
from onpolicy.outputs.metrics import Sink

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

RUN_ID = "wandb_run_id"
"""The file in the run directory with the id of the run there."""

SERVICE = "wandb-core"
"""The name of wandb's service among a process's children."""

END_SECONDS = 30.0
"""Seconds for an unused service to end."""

FINISH_SECONDS = 120
"""Seconds for unsent data at the end of a run; it stays in the run directory."""


class WandbSink(Sink):
    """A sink that continues the run named in `directory`, if there is one.

    After a resume, steps that had been logged before the run was cut short come again, with the
    same values but for times; Weights & Biases keeps the first ones. Raises OutputError for a
    failure if the output is required.
    """

    def __init__(self, output: OutputConfig, directory: Path, config: Mapping[str, Any]):
        self._is_required = output.wandb_required
        self._directory = directory
        self._run: Any = None
        self._run = self._attempt(lambda: self._open(output, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.log(dict(metrics), step=step))

    def close(self) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.finish())

    def _open(self, output: OutputConfig, config: Mapping[str, Any]) -> Any:
        import wandb

        file = self._directory / RUN_ID
        run = wandb.init(
            project=output.wandb_project,
            group=output.wandb_group or None,
            name=output.wandb_run_name or None,
            id=file.read_text().strip() if file.exists() else None,
            resume="allow",
            dir=str(self._directory),
            config=dict(config),
            settings=wandb.Settings(finish_timeout=FINISH_SECONDS, finish_timeout_raises=True),
        )
        file.write_text(f"{run.id}\n")
        return run

    def _attempt(self, call: Callable[[], Answer]) -> Answer | None:
        """Return the result of `call`; if it fails, return None and log nothing there from now on."""
        try:
            return call()
        except Exception as error:  # of its service, the network, the disk: wandb wraps not all
            message = f"Weights & Biases failed ({type(error).__name__}: {in_one_line(error)})"
            if self._is_required:
                raise OutputError(
                    f"{message}, and --wandb-required is given. Go on with --load, or without the flag."
                ) from error
            logger.warning(
                "%s. The run goes on without it; all metrics are in metrics.jsonl, and `wandb sync %s` "
                "sends what is there. --wandb-required would end such a run.",
                message, self._directory / "wandb",
            )  # fmt: skip
            self._run = None
            _end_service()
            return None


def _end_service() -> None:
    """End wandb's service now, and kill it if it hangs: at the end of a process wandb prints a
    traceback of a broken service, and waits for one that hangs."""
    ending = threading.Thread(target=_teardown, daemon=True)
    ending.start()
    ending.join(END_SECONDS)
    if ending.is_alive():
        for child in psutil.Process().children():
            if child.name() == SERVICE:
                child.kill()


def _teardown() -> None:
    import wandb

    with contextlib.suppress(Exception, SystemExit):  # it exits with the code of a failed service
        wandb.teardown()


def check_wandb(output: OutputConfig) -> None:
    """Have a run that cannot log there log into its directory, and say so.

    Asks a person at a terminal for a key. Accepts WANDB_MODE=offline or disabled. Raises
    ConfigError if wandb is not installed, or if the output is required and cannot be reached.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"--use-wandb: wandb cannot be imported ({error}). Install it: pip install wandb; or leave "
            "the flag out."
        ) from error
    try:
        if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
            wandb.login(verify=True)
    except (wandb.Error, ValueError, OSError) as error:
        _log_offline(f"--use-wandb: {_reason(error)}", output.wandb_required, error)
        _end_service()  # it has read WANDB_MODE


def _reason(error: Exception) -> str:
    """Return the reason for a failed connection; an unknown mode is one of wandb's ValueErrors."""
    mode = os.environ.get("WANDB_MODE")
    if isinstance(error, ValueError) and mode is not None:
        return f"WANDB_MODE={mode} is no mode of wandb (online, offline, disabled)."
    return in_one_line(error)


def _log_offline(reason: str, is_required: bool, error: Exception) -> None:
    remedy = (
        "Run `wandb login`, or set WANDB_API_KEY; set WANDB_MODE=offline to log into the run directory, "
        "for `wandb sync` later."
    )
    if is_required:
        raise ConfigError(f"{reason} {remedy}") from error
    logger.warning(
        "%s The run logs into its directory, as with WANDB_MODE=offline. %s", reason, remedy
    )
    os.environ["WANDB_MODE"] = "offline"
