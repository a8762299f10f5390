"""Metrics on Weights & Biases: checked before anything starts, and a resumed run goes on there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onpolicy.config.groups import OutputConfig
from onpolicy.errors import ConfigError
from onpolicy.outputs.metrics import Sink

RUN_ID = "wandb_run_id"
"""File in the run directory that names the run there."""


class WandbSink(Sink):
    """Continues the run that `directory` names, if it names one.

    After a resume, steps that had been logged before the run was cut short come again, with the same
    values but for times; Weights & Biases keeps the first ones.
    """

    def __init__(self, output: OutputConfig, directory: Path, config: Mapping[str, Any]):
        import wandb

        file = directory / RUN_ID
        self._run = wandb.init(
            project=output.wandb_project,
            group=output.wandb_group or None,
            name=output.wandb_run_name or None,
            id=file.read_text().strip() if file.exists() else None,
            resume="allow",
            dir=str(directory),
            config=dict(config),
        )
        file.write_text(f"{self._run.id}\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Raise ConfigError if a run could not be logged there: not installed, or nobody is logged in.

    Asks a person at a terminal for a key. Says nothing against WANDB_MODE=offline or disabled.
    """
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"--use-wandb: wandb cannot be imported ({error}). Install it: pip install wandb; or leave "
            "the flag out."
        ) from error
    if wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    try:
        wandb.login(verify=True)
    except wandb.Error as error:
        raise ConfigError(
            f"--use-wandb: {error} Run `wandb login`, or set WANDB_API_KEY; set WANDB_MODE=offline to "
            "log into the run directory, for `wandb sync` later."
        ) from error
