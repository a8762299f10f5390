"""The samples in a checkpoint that were not trained on yet: tokens and numbers, to the bit.

They are kept because they could not be sampled again: their weights may be gone at the resume.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from onpolicy.config import TrainConfig, settings
from onpolicy.errors import ConfigError
from onpolicy.outputs.samples import FailedAttempt
from onpolicy.outputs.trajectories import read, write
from onpolicy.rollout.episodes import Episode
from onpolicy.rollout.failures import EpisodeFailure
from onpolicy.rollout.observations import Observations
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.turns import BranchRecord
from onpolicy.run.ahead import Drawing
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.run.saving import records
from onpolicy.run.saving.checkpoint import Checkpoint
from onpolicy.system.records import checked
from onpolicy.token_weights import by_term
from onpolicy.trajectory import FinishReason
from onpolicy.types import Prompt, Sample, SampleGroup

logger = logging.getLogger(__name__)

FILE = "rollouts.json"

_SHAPE = TypeAdapter(records.Rollouts)


def is_the_same_run(config: TrainConfig, prompts: str, resumed: Checkpoint) -> bool:
    """Return whether this run would have sampled the rollouts of a checkpoint; log a warning if not.

    prompts: the digest of the prompts.
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
    """Write the rollouts into a checkpoint in progress, while sampling is idle."""
    record: dict[str, Any] = {
        "next_number": sampler.open.next_number,
        "open": [_open_group(group, sampler.observations) for group in sampler.open.groups],
        "ready": [_group(group) for group in sampler.ready],
        "drawn": {
            str(step): {
                "metrics": rollout.metrics,
                "groups": [_group(group) for group in rollout.groups],
                "failed": [_failed(each) for each in rollout.failed],
            }
            for step, rollout in rollouts.drawn.items()
        },
    }
    if sampler.curriculum.is_on:
        record["curriculum"] = sampler.curriculum.state_dict()
    (directory / FILE).write_text(json.dumps(record))


def read_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """Read the rollouts of a checkpoint whose digests were checked; it may hold none.

    Raises ConfigError for a file of another shape, or with values that no run could have sampled.
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


def _take(record: records.Rollouts, sampler: Sampler, rollouts: Drawing) -> None:
    prompts = sampler.inputs.prompts.prompts
    if (curriculum := record.get("curriculum")) is not None:
        sampler.curriculum.load_state_dict({**curriculum})
    sampler.open.groups = [_read_open_group(sampler, each) for each in record["open"]]
    sampler.open.next_number = record["next_number"]
    sampler.ready = [_read_group(prompts, each) for each in record["ready"]]
    for step, each in record["drawn"].items():
        groups = [_read_group(prompts, group) for group in each["groups"]]
        failed = [_read_failed(prompts, attempt) for attempt in each.get("failed", ())]
        rollouts.drawn[int(step)] = Rollout(groups=groups, metrics=each["metrics"], failed=failed)


def _open_group(group: OpenGroup, observations: Observations) -> dict[str, Any]:
    episodes = [_episode(each) for each in group.episodes]
    known = observations.of(group.number)
    return {"number": group.number, "episodes": episodes, "observations": known}


def _episode(episode: OpenEpisode) -> dict[str, Any]:
    branches = [_branch(each) for each in episode.record()]
    record = {"branches": branches, "failures": [_failure(each) for each in episode.failures]}
    if (found := episode.episode) is None:
        return {**record, "result": None}
    result = {
        "trajectories": [write(trajectory) for trajectory in episode.trajectories],
        **{name: getattr(found, name) for name in ("reward", "rewards", "token_rewards")},
        **_weights(found),
        "metrics": {**found.metrics},
        "info": {**found.info},
    }
    return {**record, "result": result}


def _weights(of: Episode | Sample) -> dict[str, Any]:
    return {"token_weights": by_term(of.token_weights)} if of.token_weights else {}


def _failure(failure: EpisodeFailure) -> dict[str, Any]:
    said = [write(trajectory) for trajectory in failure.said]
    return {"reason": failure.reason, "message": failure.message, "said": said}


def _read_failure(record: records.Failure) -> EpisodeFailure:
    said = tuple(read(each) for each in record.get("said", ()))
    return EpisodeFailure(reason=record["reason"], message=record["message"], said=said)


def _failed(failed: FailedAttempt) -> dict[str, Any]:
    return {
        "prompt": failed.prompt.index,
        "group": failed.group,
        "sample": failed.sample_index,
        "attempt": failed.attempt,
        "reason": failed.reason,
        "message": failed.message,
        "said": [write(trajectory) for trajectory in failed.said],
    }


def _read_failed(prompts: Sequence[Prompt], record: records.FailedAttempt) -> FailedAttempt:
    return FailedAttempt(
        prompt=_prompt(prompts, record["prompt"]),
        # Checkpoints of earlier versions have no group number.
        group=record.get("group", record["prompt"]),
        sample_index=record["sample"],
        attempt=record["attempt"],
        reason=record["reason"],
        message=record["message"],
        said=[read(each) for each in record["said"]],
    )


def _branch(branch: BranchRecord) -> dict[str, Any]:
    return {
        "key": [*branch.key],
        "trajectory": write(branch.trajectory),
        "answers": [{"end": end, "finish_reason": why} for end, why in branch.answers],
    }


def _read_open_group(sampler: Sampler, record: records.OpenGroup) -> OpenGroup:
    group = sampler.open_group(record["number"])
    if len(record["episodes"]) != len(group.episodes):
        raise ValueError(
            f"episodes of group {record['number']}: {len(record['episodes'])}, and a group has "
            f"{len(group.episodes)}"
        )
    sampler.observations.know(group.number, record["observations"])
    for episode, before in zip(group.episodes, record["episodes"], strict=True):
        failures = [_read_failure(each) for each in before["failures"]]
        episode.resume([_read_branch(each) for each in before["branches"]], failures)
        if (result := before["result"]) is not None:
            episode.finish(_read_result(result))
    return group


def _read_result(record: records.Result) -> Episode:
    return Episode(
        trajectories=[read(each) for each in record["trajectories"]],
        reward=record["reward"],
        rewards=record["rewards"],
        token_rewards=record["token_rewards"],
        token_weights=record.get("token_weights", {}),
        metrics=record["metrics"],
        info=record["info"],
    )


def _read_branch(record: records.Branch) -> BranchRecord:
    return BranchRecord(
        key=tuple(record["key"]),
        trajectory=read(record["trajectory"]),
        answers=tuple((a["end"], FinishReason(a["finish_reason"])) for a in record["answers"]),
    )


def _group(group: SampleGroup) -> dict[str, Any]:
    samples = [_sample(sample) for sample in group.samples]
    record = {"prompt": group.prompt.index, "number": group.number, "samples": samples}
    return record | ({"greedy": _sample(group.greedy)} if group.greedy else {})


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.sample_index,
        "trajectory": write(sample.trajectory),
        "seeds": [[*each] for each in sample.seeds],
        "response": sample.response,
        "reward": None if sample.has_failed else sample.reward,
        "reward_parts": sample.reward_parts,
        "has_failed": sample.has_failed,
        "is_rewarded": sample.is_rewarded,
        "token_rewards": sample.token_rewards,
        **_weights(sample),
        "metrics": sample.metrics,
        "info": sample.info,
    }


def _prompt(prompts: Sequence[Prompt], index: int) -> Prompt:
    if index >= len(prompts):
        raise ValueError(f"prompt={index}: there are {len(prompts)}")
    return prompts[index]


def _read_group(prompts: Sequence[Prompt], record: records.Group) -> SampleGroup:
    prompt = _prompt(prompts, record["prompt"])
    samples = [_read_sample(prompt, each) for each in record["samples"]]
    for place, sample in enumerate(samples):
        before = record["samples"][:place]
        sample.number = sum(other["index"] == sample.sample_index for other in before)
    group = SampleGroup(prompt=prompt, samples=samples, number=record["number"])
    if "greedy" in record:
        group.greedy = _read_sample(prompt, record["greedy"])
        group.greedy.is_greedy = True
    return group


def _read_sample(prompt: Prompt, record: records.Sample) -> Sample:
    count = len(record["trajectory"]["rollout_log_probs"])
    weights = record.get("token_weights", {})
    for name, numbers in [("token_rewards", record["token_rewards"]), *weights.items()]:
        if numbers is not None and len(numbers) != count:
            raise ValueError(f"{name}={len(numbers)} numbers: {count} tokens are sampled")
    reward, has_failed = record["reward"], record.get("has_failed", False)
    if reward is None and not has_failed:
        raise ValueError("reward=None: it is that of a sample that could not be scored")
    return Sample(
        prompt=prompt,
        sample_index=record["index"],
        trajectory=read(record["trajectory"]),
        seeds=[(seed, count) for seed, count in record.get("seeds", ())],
        response=record["response"],
        reward=math.nan if reward is None or has_failed else reward,
        reward_parts=record["reward_parts"],
        has_failed=has_failed,
        is_rewarded=record["is_rewarded"],
        token_rewards=record["token_rewards"],
        token_weights=weights,
        metrics=record["metrics"],
        info=record["info"],
    )
