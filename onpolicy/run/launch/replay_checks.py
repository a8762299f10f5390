"""The checks that a journal of rollouts can be replayed by this run, before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from onpolicy.config import TrainConfig, settings
from onpolicy.errors import ConfigError
from onpolicy.outputs.rollout_journal import Record, RolloutJournal, read
from onpolicy.run.saving import digest_prompts
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)

BY_CONTENT = frozenset({"hf_checkpoint"})
"""The paths compared by the digest of the pushed weights; this module also compares prompts."""


def read_replayed(config: TrainConfig, prompts: Sequence[Prompt]) -> RolloutJournal | None:
    """Return the journal that --replay names, if any.

    Raises ConfigError for the first difference between its run and this one, and for a missing rollout.
    """
    if not (file := config.rollout.replay):
        return None
    journal, digest = read(file), digest_prompts(prompts)
    for start in journal.starts:
        _require_settings(file, start["config"], config)
        if start["prompts"] != digest and not _is_allowed("prompt_data", config):
            raise ConfigError(
                f"--prompt-data={config.data.sources}: its prompts are others than those of the run "
                f"that wrote --replay={file}. Give the same, or add --allow-changed-settings "
                "prompt_data."
            )
    first = min(journal.steps) if config.output.load else 0
    require_steps(journal, first, config.rollout.num_rollout)
    return journal


def require_steps(journal: RolloutJournal, first: int, last: int) -> None:
    """Raise ConfigError if a rollout from `first` on and before `last` is missing."""
    for step in range(first, last):
        if step not in journal.steps:
            raise ConfigError(
                f"--replay={journal.file}: holds rollouts {min(journal.steps)} to "
                f"{max(journal.steps)}, and not rollout {step}, which this run would come to. Give "
                f"--num-rollout up to {max(journal.steps) + 1}; a journal that begins later needs "
                "--load of the checkpoint that its run went on from."
            )


def _require_settings(file: str, recorded: Record, config: TrainConfig) -> None:
    for change in settings.changes(recorded, config):
        name = change.name
        is_shorter = name == "num_rollout" and config.trainer.lr_decay_style == "constant"
        if is_shorter or name in BY_CONTENT:
            continue
        if not _is_allowed(name, config):
            raise ConfigError(
                f"--replay={file}: is the journal of another run: {change}. Give what that run was "
                f"given (its config.json has it), or add --allow-changed-settings {name} if it decides "
                "nothing here."
            )
        logger.warning("--replay=%s: replayed under a changed setting: %s", file, change)


def _is_allowed(name: str, config: TrainConfig) -> bool:
    return name in config.output.allow_changed_settings
