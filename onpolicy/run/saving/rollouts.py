"""What was drawn and not trained on yet, in a checkpoint: tokens and numbers, to the bit.

Its weights may be gone by the time of a resume, so it is kept and not drawn again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.run.ahead import Drawing
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.types import Completion, FinishReason, Prompt, Sample, SampleGroup, Span

FILE = "rollouts.json"


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
    """From a checkpoint whose digests were compared; it may be of a run that draws nothing ahead."""
    file = directory / FILE
    if not file.exists():
        return
    record, prompts = json.loads(file.read_text()), sampler.inputs.prompts.prompts
    sampler.open.groups = [_read_open_group(sampler, each) for each in record["open"]]
    sampler.open.next_number = record["next_number"]
    sampler.ready = [_read_group(prompts, each) for each in record["ready"]]
    for step, each in record["drawn"].items():
        groups = [_read_group(prompts, group) for group in each["groups"]]
        rollouts.drawn[int(step)] = Rollout(groups=groups, metrics=each["metrics"])


def _open_group(group: OpenGroup) -> dict[str, Any]:
    so_far = [None if c is None else _completion(c) for c in group.completions]
    return {"number": group.number, "completions": so_far}


def _read_open_group(sampler: Sampler, record: dict[str, Any]) -> OpenGroup:
    group = sampler.open_group(record["number"])
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


def _read_group(prompts: Sequence[Prompt], record: dict[str, Any]) -> SampleGroup:
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


def _read_completion(record: dict[str, Any]) -> Completion:
    experts = record["routed_experts"]
    return Completion(
        response_ids=_unpacked(record["response_ids"], "<i4").tolist(),
        rollout_log_probs=_unpacked(record["rollout_log_probs"], "<f8").tolist(),
        finish_reason=FinishReason(record["finish_reason"]),
        weight_version=record["weight_version"],
        num_cached_tokens=record["num_cached_tokens"],
        routed_experts=experts and _unpacked(experts[2], "<i4").reshape(experts[:2]),
        spans=tuple(Span(version=v, start=start, end=end) for v, start, end in record["spans"]),
    )


def _packed(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _unpacked(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
