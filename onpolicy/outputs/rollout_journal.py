"""Journal of a run whose order depends on the clock: rollouts.jsonl in the run directory.

    {"step": 0, "config": {...}, "prompts": "<digest>"}
    {"step": 0, "weights": "<digest>", "groups": [{"number": 2, "samples": [
        {"spans": [[0, 5], [1, 3]], "tokens": "<digest>"}, ...]}, ...]}

A line holds the groups that a step was trained on, in their order, and for each response the number
of tokens sampled from each version of the weights. Everything else about a run follows from it.
Lines are added as a whole, before the step is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NotRequired

from annotated_types import Len
from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.errors import ConfigError
from onpolicy.outputs.metrics import drop_from, read_jsonl
from onpolicy.outputs.trajectories import Count, digest
from onpolicy.system import files
from onpolicy.system.records import CLOSED, checked
from onpolicy.trajectory import Trajectory
from onpolicy.types import BranchKey, SampleGroup, Spans

Record = dict[str, Any]


@with_config(CLOSED)
class _Drawn(TypedDict):
    spans: list[Annotated[list[Count], Len(2, 2)]]
    tokens: str


@with_config(CLOSED)
class _Branch(TypedDict):
    key: list[str]
    spans: list[Annotated[list[Count], Len(2, 2)]]


@with_config(CLOSED)
class _Group(TypedDict):
    number: Count
    samples: list[_Drawn]
    branches: NotRequired[list[list[_Branch]]]
    """The branches of each episode; left out where each episode is its one sample."""


@with_config(CLOSED)
class _Step(TypedDict):
    step: Count
    weights: str
    groups: list[_Group]


@with_config(CLOSED)
class _Start(TypedDict):
    step: Count
    config: dict[str, Any]
    prompts: str


_STEP, _START = TypeAdapter(_Step), TypeAdapter(_Start)


def begin(file: Path, step: int, config: Mapping[str, Any], prompts: str) -> None:
    """Start or resume the journal with `step`: earlier records of it and of later steps are
    dropped."""
    drop_from(file, step)
    add(file, {"step": step, "config": dict(config), "prompts": prompts})


def add(file: Path, record: Record) -> None:
    """Add the record of a step that is about to be taken."""
    files.append(file, json.dumps(record).encode())


def record_of(step: int, weights: str, groups: Iterable[SampleGroup]) -> Record:
    """Return the record of a step that learns from `groups`, starting from the weights with that
    digest."""
    return {"step": step, "weights": weights, "groups": [_group(group) for group in groups]}


def _group(group: SampleGroup) -> Record:
    record: Record = {
        "number": group.number,
        "samples": [_drawn(sample.trajectory) for sample in group.samples],
    }
    are_plain = all([*episode] == [()] for episode in group.branches)
    if not are_plain or len(group.samples) != len(group.branches):
        record["branches"] = [
            [{"key": [*key], "spans": [[*s] for s in spans]} for key, spans in episode.items()]
            for episode in group.branches
        ]
    return record


def _drawn(trajectory: Trajectory) -> Record:
    """Return a trajectory's spans, and a digest of its tokens and their log-probabilities."""
    spans = [[span.version, span.end - span.start] for span in trajectory.spans]
    return {"spans": spans, "tokens": digest(trajectory)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJournal:
    """A journal that was read from a file."""

    file: str
    starts: Sequence[Record]
    """The start and the resumes of the run: "step", "config" and "prompts"."""

    steps: Mapping[int, Record]

    def spans(self) -> dict[tuple[int, int], dict[BranchKey, Spans]]:
        """Return the spans of each episode's branches, by the number of its group and its index
        there."""
        return {
            (group["number"], i): {
                tuple(branch["key"]): [(version, tokens) for version, tokens in branch["spans"]]
                for branch in branches
            }
            for record in self.steps.values()
            for group in record["groups"]
            for i, branches in enumerate(_branches_of(group))
        }


def _branches_of(group: Record) -> list[list[Record]]:
    plain = [[{"key": [], "spans": sample["spans"]}] for sample in group["samples"]]
    branches: list[list[Record]] = group.get("branches", plain)
    return branches


def read(file: str) -> RolloutJournal:
    """Read a journal. Raises ConfigError for a file that is none, or holds impossible records."""
    try:
        records = read_jsonl(Path(file))
    except OSError as error:
        raise ConfigError(
            f"--replay={file}: cannot be read ({error.strerror}). Give the rollouts.jsonl of a run with "
            "--rollout-schedule free."
        ) from error
    starts = [record for record in records if "config" in record]
    steps = {record["step"]: record for record in records if "groups" in record}
    if not starts or not steps:
        raise ConfigError(
            f"--replay={file}: holds no rollouts. Give the rollouts.jsonl of a run with "
            "--rollout-schedule free."
        )
    for record in starts:
        _require_shape(file, record, _START)
    for record in steps.values():
        _require_shape(file, record, _STEP)
        _require_possible(file, record)
    return RolloutJournal(file=file, starts=starts, steps=steps)


def _require_shape(file: str, record: Record, shape: TypeAdapter[Any]) -> None:
    try:
        checked(shape, record)
    except ValueError as error:
        raise ConfigError(
            f"--replay={file}: step {record['step']}, {error}. The file was changed; give the one that "
            "the run wrote."
        ) from error


def _require_possible(file: str, record: Record) -> None:
    """Raise ConfigError for impossible spans: a token from weights that did not exist yet."""
    step = record["step"]
    wrong = [
        f"group {group['number']}, response {i}: spans={sample['spans']}"
        for group in record["groups"]
        for i, sample in enumerate(chain(group["samples"], *_branches_of(group)))
        if not _is_possible(sample["spans"], step)
    ]
    if wrong:
        raise ConfigError(
            f"--replay={file}: step {step}, {wrong[0]}: spans are (version, tokens), with versions that "
            f"grow up to {step}. The file was changed; give the one that the run wrote."
        )


def _is_possible(spans: Spans, step: int) -> bool:
    versions = [version for version, _ in spans]
    grows = sorted({*versions}) == versions and bool(versions) and versions[-1] <= step
    return grows and min(tokens for _, tokens in spans) >= 1
