"""The Hugging Face checkpoint at a path, and the settings of the run that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.run.saving.checkpoint import STATE, checkpoints, read
from onpolicy.system.reading import read_json_object

OTHERWISE_IN_SFT = ("eval_prompt_data", "label_key")
"""The flags of `onpolicy sft` that name answers to learn, where `onpolicy train` means prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A Hugging Face checkpoint, which any program can read."""

    hf_checkpoint: Path
    rollouts_done: int = 0

    config: Mapping[str, Any] = field(default_factory=dict)
    """The flags of the run that wrote it, by name; empty if no run of ours did."""


def find_published(path: str) -> Published:
    """Return the checkpoint at `path`: a Hugging Face checkpoint, one of ours, or the latest one in a
    directory of checkpoints or of a run.

    Every byte of one of ours is checked. Raises ConfigError if there is none, or if it is damaged.
    """
    given = Path(path)
    directory = given.parent if given.name == "hf" and (given.parent / STATE).exists() else given
    if not (directory / STATE).exists():
        directory = _latest(directory) or directory
    if not (directory / STATE).exists():
        if not (given / "config.json").is_file():
            raise ConfigError(
                f"CHECKPOINT={path}: holds neither a Hugging Face checkpoint nor one of a run. Give a "
                "directory of either, or one that --save named."
            )
        return Published(hf_checkpoint=given)
    try:
        found = read(directory)
    except CheckpointError as error:
        raise ConfigError(
            f"CHECKPOINT={path}: {directory}: {error}. Give another checkpoint."
        ) from error
    config = found.config
    if "save_hf" in config:
        config = {name: x for name, x in config.items() if name not in OTHERWISE_IN_SFT}
    return Published(
        hf_checkpoint=directory / "hf",
        rollouts_done=found.state.rollouts_done,
        config=config,
    )


def _latest(directory: Path) -> Path | None:
    """Return the latest checkpoint in a directory, or of the run whose directory it is.

    Raises ConfigError for a run that saved none.
    """
    if there := checkpoints(directory):
        return there[max(there)]
    file = directory / "config.json"
    if not (directory / "contract.json").is_file() or not file.is_file():
        return None
    save = read_json_object(file, f"CHECKPOINT={directory}: config.json").get("save")
    there = checkpoints(Path(save)) if isinstance(save, str) and save else {}
    if not there:
        raise ConfigError(
            f"CHECKPOINT={directory}: the run saved no checkpoint (--save={save or ''!r}). Give "
            "`onpolicy train` --save DIR and --save-interval N."
        )
    return there[max(there)]
