"""The samples in a checkpoint that were not trained on yet: tokens and numbers, to the bit.

They are kept because they could not be sampled again: their weights may be gone at the resume.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onpolicy.config import TrainConfig, settings
from onpolicy.errors import ConfigError
from onpolicy.rollout.failures import EpisodeFailure
from onpolicy.rollout.prompt_order import CurriculumState
from onpolicy.run.drawing import Drawing
from onpolicy.run.sampler import Drawn, Sampler
from onpolicy.run.saving.checkpoint import Checkpoint
from onpolicy.system.records import Count, Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import Sample

logger = logging.getLogger(__name__)

FILE = "rollouts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenEpisode:
    branches: list[Trajectory]
    failures: list[EpisodeFailure]
    samples: list[Sample] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenGroup:
    number: Count
    episodes: list[_OpenEpisode]
    observations: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollouts:
    """The content of the file."""

    next_number: Count
    open: list[_OpenGroup]
    drawn: dict[Count, Drawn]
    curriculum: CurriculumState


_SHAPE = Shape(_Rollouts)


def is_the_same_run(config: TrainConfig, prompts: str, resumed: Checkpoint) -> bool:
    """Return whether this run would have sampled a checkpoint's rollouts; log a warning if not."""
    if resumed.state.prompts == prompts and not settings.changes(resumed.config, config):
        return True
    if (resumed.directory / FILE).exists():
        logger.warning(
            "what %s holds of rollouts was drawn under other settings: it is drawn again",
            resumed.directory,
        )
    return False


def write_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """Write the rollouts into a checkpoint in progress, while sampling is idle."""
    groups = [
        _OpenGroup(
            number=number,
            episodes=[
                # Copies: in free schedules episodes go on meanwhile.
                _OpenEpisode(
                    branches=each.record(), failures=[*each.failures], samples=each.samples
                )
                for each in group
            ],
            observations=sampler.observations.of(number),
        )
        for number, group in [*sampler.open.groups.items()]
    ]
    record = _Rollouts(
        next_number=sampler.open.next_number,
        open=groups,
        drawn=rollouts.drawn,
        curriculum=sampler.curriculum.state,
    )
    (directory / FILE).write_text(_SHAPE.write(record))


def read_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """Read the rollouts of a checkpoint whose digests were checked; it may hold none. Raises
    ConfigError for a file of another shape, or with values that no run could have sampled."""
    file = directory / FILE
    if not file.exists():
        return
    try:
        record = _SHAPE.read(file.read_bytes(), sampler.inputs.prompts.prompts)
        sampler.curriculum.resume(record.curriculum)
        sampler.open.groups = {}
        for group in record.open:
            _resume(sampler, group)
        sampler.open.next_number = record.next_number
        rollouts.drawn.update(record.drawn)
    except ValueError as error:
        raise ConfigError(
            f"--load={directory}: {FILE}: {error}. No run of this version wrote it: resume from an "
            "earlier checkpoint, or with the version that wrote it."
        ) from error


def _resume(sampler: Sampler, record: _OpenGroup) -> None:
    group = sampler.open_group(record.number)
    if len(record.episodes) != len(group):
        raise ValueError(
            f"episodes of group {record.number}: {len(record.episodes)}, and a group has {len(group)}"
        )
    sampler.observations.know(record.number, record.observations)
    for episode, before in zip(group, record.episodes, strict=True):
        episode.resume(before.branches, before.failures)
        episode.samples = before.samples
    sampler.open.groups[record.number] = group
