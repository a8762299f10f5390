"""What was drawn and not trained on yet, in a checkpoint: tokens and numbers, to the bit.

Its weights may be gone by the time of a resume, so it is kept and not drawn again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.config import TrainConfig, settings
from onpolicy.errors import ConfigError
from onpolicy.outputs.trajectories import Count, TrajectoryRecord, read, write
from onpolicy.rollout.episodes import Episode
from onpolicy.rollout.failures import EpisodeFailure
from onpolicy.rollout.observations import Observations
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.turns import BranchRecord
from onpolicy.run.ahead import Drawing
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.run.saving.checkpoint import Checkpoint
from onpolicy.system.records import CLOSED, checked
from onpolicy.trajectory import FinishReason
from onpolicy.types import Prompt, Sample, SampleGroup

logger = logging.getLogger(__name__)

FILE = "rollouts.json"


@with_config(CLOSED)
class _Sample(TypedDict):
    index: Count
    trajectory: TrajectoryRecord
    response: str
    reward: float
    reward_parts: dict[str, float]
    is_rewarded: bool
    token_rewards: list[float] | None
    metrics: dict[str, float]
    info: dict[str, Any]


@with_config(CLOSED)
class _Group(TypedDict):
    prompt: Count
    number: Count
    samples: list[_Sample]


@with_config(CLOSED)
class _Answer(TypedDict):
    end: Count
    finish_reason: str


@with_config(CLOSED)
class _Branch(TypedDict):
    key: list[str]
    trajectory: TrajectoryRecord
    answers: list[_Answer]


@with_config(CLOSED)
class _Result(TypedDict):
    trajectories: list[TrajectoryRecord]
    reward: float | None
    rewards: list[float] | None
    token_rewards: list[list[float]] | None
    metrics: dict[str, float]
    info: dict[str, Any]


@with_config(CLOSED)
class _Failure(TypedDict):
    reason: str
    message: str


@with_config(CLOSED)
class _Episode(TypedDict):
    branches: list[_Branch]
    failures: list[_Failure]
    result: _Result | None
    """What became of a complete one."""


@with_config(CLOSED)
class _OpenGroup(TypedDict):
    number: Count
    episodes: list[_Episode]
    observations: dict[str, Any]
    """Under their keys (`rollout/observations.py`)."""


@with_config(CLOSED)
class _Drawn(TypedDict):
    metrics: dict[str, float]
    groups: list[_Group]


@with_config(CLOSED)
class _Curriculum(TypedDict):
    step: Count
    position: Count
    chosen: dict[str, Count]
    rates: dict[str, list[float]]
    measured: list[list[float]]


@with_config(CLOSED)
class _Record(TypedDict):
    next_number: Count
    open: list[_OpenGroup]
    ready: list[_Group]
    drawn: dict[str, _Drawn]
    curriculum: NotRequired[_Curriculum]


_SHAPE = TypeAdapter(_Record)


def is_the_same_run(config: TrainConfig, prompts: str, resumed: Checkpoint) -> bool:
    """Whether what a checkpoint holds of rollouts is what this run would have drawn; says so if not.

    `prompts`: their digest.
    """
    if resumed.state.prompts == prompts and not settings.changes(resumed.config, config):
        return True
    if (resumed.directory / FILE).exists():
        logger.warning(
            "what %s holds of rollouts was drawn under other settings: it is drawn again",
            resumed.directory,
        )
    return False


def write_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """Into a checkpoint that is being written; nothing is being drawn meanwhile."""
    record: dict[str, Any] = {
        "next_number": sampler.open.next_number,
        "open": [_open_group(group, sampler.observations) for group in sampler.open.groups],
        "ready": [_group(group) for group in sampler.ready],
        "drawn": {
            str(step): {"metrics": rollout.metrics, "groups": [_group(g) for g in rollout.groups]}
            for step, rollout in rollouts.drawn.items()
        },
    }
    if sampler.curriculum.is_on:
        record["curriculum"] = sampler.curriculum.state_dict()
    (directory / FILE).write_text(json.dumps(record))


def read_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """From a checkpoint whose digests were compared; it may be of a run that draws nothing ahead.

    Raises ConfigError for a file of another shape, or of what no run has drawn.
    """
    file = directory / FILE
    if not file.exists():
        return
    try:
        _take(checked(_SHAPE, json.loads(file.read_bytes())), sampler, rollouts)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--load={directory}: {FILE}: {error}. No run of this version wrote it: resume from an "
            "earlier checkpoint, or with the version that wrote it."
        ) from error


def _take(record: _Record, sampler: Sampler, rollouts: Drawing) -> None:
    prompts = sampler.inputs.prompts.prompts
    if (curriculum := record.get("curriculum")) is not None:
        sampler.curriculum.load_state_dict({**curriculum})
    sampler.open.groups = [_read_open_group(sampler, each) for each in record["open"]]
    sampler.open.next_number = record["next_number"]
    sampler.ready = [_read_group(prompts, each) for each in record["ready"]]
    for step, each in record["drawn"].items():
        groups = [_read_group(prompts, group) for group in each["groups"]]
        rollouts.drawn[int(step)] = Rollout(groups=groups, metrics=each["metrics"])


def _open_group(group: OpenGroup, observations: Observations) -> dict[str, Any]:
    episodes = [_episode(each) for each in group.episodes]
    known = observations.of(group.number)
    return {"number": group.number, "episodes": episodes, "observations": known}


def _episode(episode: OpenEpisode) -> dict[str, Any]:
    branches = [_branch(each) for each in episode.record()]
    record = {"branches": branches, "failures": [asdict(each) for each in episode.failures]}
    if (found := episode.episode) is None:
        return {**record, "result": None}
    result = {
        "trajectories": [write(trajectory) for trajectory in episode.trajectories],
        **{name: getattr(found, name) for name in ("reward", "rewards", "token_rewards")},
        "metrics": {**found.metrics},
        "info": {**found.info},
    }
    return {**record, "result": result}


def _branch(branch: BranchRecord) -> dict[str, Any]:
    return {
        "key": [*branch.key],
        "trajectory": write(branch.trajectory),
        "answers": [{"end": end, "finish_reason": why} for end, why in branch.answers],
    }


def _read_open_group(sampler: Sampler, record: _OpenGroup) -> OpenGroup:
    group = sampler.open_group(record["number"])
    if len(record["episodes"]) != len(group.episodes):
        raise ValueError(
            f"episodes of group {record['number']}: {len(record['episodes'])}, and a group has "
            f"{len(group.episodes)}"
        )
    sampler.observations.know(group.number, record["observations"])
    for episode, before in zip(group.episodes, record["episodes"], strict=True):
        failures = [EpisodeFailure(**each) for each in before["failures"]]
        episode.resume([_read_branch(each) for each in before["branches"]], failures)
        if (result := before["result"]) is not None:
            episode.finish(_read_result(result))
    return group


def _read_result(record: _Result) -> Episode:
    return Episode(
        trajectories=[read(each) for each in record["trajectories"]],
        reward=record["reward"],
        rewards=record["rewards"],
        token_rewards=record["token_rewards"],
        metrics=record["metrics"],
        info=record["info"],
    )


def _read_branch(record: _Branch) -> BranchRecord:
    return BranchRecord(
        key=tuple(record["key"]),
        trajectory=read(record["trajectory"]),
        answers=tuple((a["end"], FinishReason(a["finish_reason"])) for a in record["answers"]),
    )


def _group(group: SampleGroup) -> dict[str, Any]:
    samples = [
        {
            "index": sample.sample_index,
            "trajectory": write(sample.trajectory),
            "response": sample.response,
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            "is_rewarded": sample.is_rewarded,
            "token_rewards": sample.token_rewards,
            "metrics": sample.metrics,
            "info": sample.info,
        }
        for sample in group.samples
    ]
    return {"prompt": group.prompt.index, "number": group.number, "samples": samples}


def _read_group(prompts: Sequence[Prompt], record: _Group) -> SampleGroup:
    if record["prompt"] >= len(prompts):
        raise ValueError(f"prompt={record['prompt']}: there are {len(prompts)}")
    prompt = prompts[record["prompt"]]
    for each in record["samples"]:
        rewards, count = each["token_rewards"], len(each["trajectory"]["rollout_log_probs"])
        if rewards is not None and len(rewards) != count:
            raise ValueError(f"token_rewards={len(rewards)} numbers: {count} tokens are sampled")
    samples = [
        Sample(
            prompt=prompt,
            sample_index=each["index"],
            number=sum(other["index"] == each["index"] for other in record["samples"][:place]),
            trajectory=read(each["trajectory"]),
            response=each["response"],
            reward=each["reward"],
            reward_parts=each["reward_parts"],
            is_rewarded=each["is_rewarded"],
            token_rewards=each["token_rewards"],
            metrics=each["metrics"],
            info=each["info"],
        )
        for place, each in enumerate(record["samples"])
    ]
    return SampleGroup(prompt=prompt, samples=samples, number=record["number"])
