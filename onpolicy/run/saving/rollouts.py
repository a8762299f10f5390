"""What was drawn and not trained on yet, in a checkpoint: tokens and numbers, to the bit.

Its weights may be gone by the time of a resume, so it is kept and not drawn again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Len
from numpy.typing import NDArray
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.errors import ConfigError
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.run.ahead import Drawing
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.system.records import CLOSED, checked
from onpolicy.types import Completion, FinishReason, Prompt, Sample, SampleGroup, Span

FILE = "rollouts.json"

Count = Annotated[int, Ge(0)]


@with_config(CLOSED)
class _Completion(TypedDict):
    response_ids: str
    """int32 [R], packed."""
    rollout_log_probs: str
    """float64 [R], packed."""
    finish_reason: str
    weight_version: str
    num_cached_tokens: Count
    routed_experts: Annotated[list[Count | str], Len(3, 3)] | None
    """Rows, columns, and as many int32 numbers, packed."""
    spans: list[Annotated[list[str | Count], Len(3, 3)]]
    """Version, start and end."""


@with_config(CLOSED)
class _Sample(TypedDict):
    completion: _Completion
    response: str
    reward: float
    reward_parts: dict[str, float]


@with_config(CLOSED)
class _Group(TypedDict):
    prompt: Count
    number: Count
    samples: list[_Sample]


@with_config(CLOSED)
class _OpenGroup(TypedDict):
    number: Count
    completions: list[_Completion | None]


@with_config(CLOSED)
class _Drawn(TypedDict):
    metrics: dict[str, float]
    groups: list[_Group]


@with_config(CLOSED)
class _Record(TypedDict):
    next_number: Count
    open: list[_OpenGroup]
    ready: list[_Group]
    drawn: dict[str, _Drawn]


_SHAPE = TypeAdapter(_Record)


def write_rollouts(directory: Path, sampler: Sampler, rollouts: Drawing) -> None:
    """Into a checkpoint that is being written; nothing is being drawn meanwhile."""
    record = {
        "next_number": sampler.open.next_number,
        "open": [_open_group(group) for group in sampler.open.groups],
        "ready": [_group(group) for group in sampler.ready],
        "drawn": {
            str(step): {"metrics": rollout.metrics, "groups": [_group(g) for g in rollout.groups]}
            for step, rollout in rollouts.drawn.items()
        },
    }
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
    sampler.open.groups = [_read_open_group(sampler, each) for each in record["open"]]
    sampler.open.next_number = record["next_number"]
    sampler.ready = [_read_group(prompts, each) for each in record["ready"]]
    for step, each in record["drawn"].items():
        groups = [_read_group(prompts, group) for group in each["groups"]]
        rollouts.drawn[int(step)] = Rollout(groups=groups, metrics=each["metrics"])


def _open_group(group: OpenGroup) -> dict[str, Any]:
    so_far = [None if c is None else _completion(c) for c in group.completions]
    return {"number": group.number, "completions": so_far}


def _read_open_group(sampler: Sampler, record: _OpenGroup) -> OpenGroup:
    group = sampler.open_group(record["number"])
    if len(record["completions"]) != len(group.completions):
        raise ValueError(
            f"completions of group {record['number']}: {len(record['completions'])}, and a group has "
            f"{len(group.completions)}"
        )
    group.completions = [None if c is None else _read_completion(c) for c in record["completions"]]
    return group


def _group(group: SampleGroup) -> dict[str, Any]:
    samples = [
        {
            "completion": _completion(sample.completion),
            "response": sample.response,
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
        }
        for sample in group.samples
    ]
    return {"prompt": group.prompt.index, "number": group.number, "samples": samples}


def _read_group(prompts: Sequence[Prompt], record: _Group) -> SampleGroup:
    if record["prompt"] >= len(prompts):
        raise ValueError(f"prompt={record['prompt']}: there are {len(prompts)}")
    prompt = prompts[record["prompt"]]
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            completion=_read_completion(each["completion"]),
            response=each["response"],
            reward=each["reward"],
            reward_parts=each["reward_parts"],
        )
        for i, each in enumerate(record["samples"])
    ]
    return SampleGroup(prompt=prompt, samples=samples, number=record["number"])


def _completion(completion: Completion) -> dict[str, Any]:
    experts = completion.routed_experts
    return {
        "response_ids": _packed(np.array(completion.response_ids, dtype="<i4")),
        "rollout_log_probs": _packed(np.array(completion.rollout_log_probs, dtype="<f8")),
        "finish_reason": str(completion.finish_reason),
        "weight_version": completion.weight_version,
        "num_cached_tokens": completion.num_cached_tokens,
        "routed_experts": None if experts is None else [*experts.shape, _packed(experts)],
        "spans": [astuple(span) for span in completion.spans],
    }


def _read_completion(record: _Completion) -> Completion:
    response_ids = _unpacked(record["response_ids"], "<i4").tolist()
    rollout_log_probs = _unpacked(record["rollout_log_probs"], "<f8").tolist()
    if len(response_ids) != len(rollout_log_probs):
        raise ValueError(
            f"response_ids are {len(response_ids)} and rollout_log_probs {len(rollout_log_probs)}: a "
            "token has one"
        )
    return Completion(
        response_ids=response_ids,
        rollout_log_probs=rollout_log_probs,
        finish_reason=FinishReason(record["finish_reason"]),
        weight_version=record["weight_version"],
        num_cached_tokens=record["num_cached_tokens"],
        routed_experts=_read_experts(record["routed_experts"]),
        spans=tuple(_read_span(span, len(response_ids)) for span in record["spans"]),
    )


def _read_experts(record: Sequence[int | str] | None) -> NDArray[np.int32] | None:
    match record:
        case None:
            return None
        case [int(rows), int(columns), str(packed)]:
            return _unpacked(packed, "<i4").reshape(rows, columns)
    raise ValueError(f"routed_experts={str(record)[:60]}: must be rows, columns and their numbers")


def _read_span(record: Sequence[str | int], num_tokens: int) -> Span:
    match record:
        case [str(version), int(start), int(end)] if start <= end <= num_tokens:
            return Span(version=version, start=start, end=end)
    raise ValueError(f"span={record}: must be a version, a start and an end up to {num_tokens}")


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _unpacked(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
