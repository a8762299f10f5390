"""Journal of a run whose order depends on the clock: rollouts.jsonl in the run directory.

    {"step": 0, "config": {...}, "prompts": "<digest>"}
    {"step": 0, "weights": "<digest>", "groups": [{"number": 2, "samples": [
        {"spans": [[0, 5], [1, 3]], "tokens": "<digest>"}, ...]}, ...]}

A line holds the groups that a step was trained on, in their order, and for each response the number
of tokens sampled from each version of the weights. Everything else about a run follows from it.
Lines are added as a whole, before the step is taken.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from onpolicy.errors import ConfigError
from onpolicy.outputs.metrics import drop_from, read_jsonl
from onpolicy.system import files
from onpolicy.system.records import Count, Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import BranchKey, SampleGroup

SpanLengths = list[tuple[Count, Count]]
"""(version, number of tokens) in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSample:
    """The spans of a trajectory, and a digest of its tokens and their log-probabilities."""

    spans: SpanLengths
    tokens: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBranch:
    """The spans of a branch of an episode."""

    key: BranchKey
    spans: SpanLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGroup:
    """The samples and the branches of a group."""

    number: Count
    samples: list[DrawnSample]

    branches: list[list[DrawnBranch]] | None = None
    """The branches of each episode; None where each episode is its one sample."""

    @property
    def episodes(self) -> list[list[DrawnBranch]]:
        """Return the branches of each episode."""
        plain = [[DrawnBranch(key=(), spans=sample.spans)] for sample in self.samples]
        return plain if self.branches is None else self.branches


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """The groups that a step learns from, starting from the weights with that digest."""

    step: Count
    weights: str
    groups: list[DrawnGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStart:
    """The start or a resume of the run."""

    step: Count
    config: dict[str, Any]
    prompts: str


_STEP, _START = Shape(DrawnStep), Shape(JournalStart)

Line = TypeVar("Line", DrawnStep, JournalStart)


def begin(file: Path, step: int, config: Mapping[str, Any], prompts: str) -> None:
    """Start or resume the journal with `step`, without earlier records of it and of later steps."""
    drop_from(file, step)
    start = JournalStart(step=step, config=dict(config), prompts=prompts)
    files.append(file, _START.write(start).encode())


def add(file: Path, record: DrawnStep) -> None:
    """Add the record of a step that is about to be taken."""
    files.append(file, _STEP.write(record).encode())


def record_of(step: int, weights: str, groups: Iterable[SampleGroup]) -> DrawnStep:
    """Return the record of a step that learns from `groups`, and starts from these weights."""
    return DrawnStep(step=step, weights=weights, groups=[_group(group) for group in groups])


def _group(group: SampleGroup) -> DrawnGroup:
    samples = [_drawn(sample.trajectory) for sample in group.samples]
    are_plain = all([*episode] == [()] for episode in group.branches)
    if are_plain and len(group.samples) == len(group.branches):
        return DrawnGroup(number=group.number, samples=samples)
    branches = [
        [DrawnBranch(key=key, spans=spans) for key, spans in episode.items()]
        for episode in group.branches
    ]
    return DrawnGroup(number=group.number, samples=samples, branches=branches)


def _drawn(trajectory: Trajectory) -> DrawnSample:
    spans = [(span.version, span.end - span.start) for span in trajectory.spans]
    return DrawnSample(spans=spans, tokens=digest(trajectory))


def digest(trajectory: Trajectory) -> str:
    """Return 16 hexadecimal digits of the sampled tokens, their log-probabilities, and what else an
    engine told of them."""
    ids, log_probs = trajectory.response_ids, trajectory.rollout_log_probs
    content = ids.array.astype("<i8").tobytes() + log_probs.array.tobytes()
    told = b"".join([*trajectory.kept_tokens, *trajectory.likeliest])
    return xxhash.xxh3_64_hexdigest(content + told)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJournal:
    """A journal that was read from a file."""

    file: str
    starts: Sequence[JournalStart]
    steps: Mapping[int, DrawnStep]

    def spans(self) -> dict[tuple[int, int], dict[BranchKey, SpanLengths]]:
        """Return the spans of each episode's branches, by its group's number and its index there."""
        return {
            (group.number, i): {branch.key: branch.spans for branch in branches}
            for record in self.steps.values()
            for group in record.groups
            for i, branches in enumerate(group.episodes)
        }


def read(file: str) -> RolloutJournal:
    """Read a journal. Raises ConfigError for a file that is none, or holds impossible records."""
    try:
        records = read_jsonl(Path(file))
    except OSError as error:
        raise ConfigError(
            f"--replay={file}: cannot be read ({error.strerror}). Give the rollouts.jsonl of a run with "
            "--rollout-schedule free."
        ) from error
    starts = [_taken(file, each, _START) for each in records if "config" in each]
    steps = {each["step"]: _taken(file, each, _STEP) for each in records if "groups" in each}
    if not starts or not steps:
        raise ConfigError(
            f"--replay={file}: holds no rollouts. Give the rollouts.jsonl of a run with "
            "--rollout-schedule free."
        )
    for step in steps.values():
        _require_possible(file, step)
    return RolloutJournal(file=file, starts=starts, steps=steps)


def _taken(file: str, record: dict[str, Any], shape: Shape[Line]) -> Line:
    try:
        return shape.take(record)
    except ValueError as error:
        raise ConfigError(
            f"--replay={file}: step {record['step']}, {error}. The file was changed, or another version "
            "wrote it; give the one that a run of this version wrote."
        ) from error


def _require_possible(file: str, record: DrawnStep) -> None:
    """Raise ConfigError for impossible spans: a token from weights that did not exist yet."""
    wrong = [
        f"group {group.number}, response {i}: spans={spans}"
        for group in record.groups
        for i, spans in enumerate(_spans(group))
        if not _is_possible(spans, record.step)
    ]
    if wrong:
        raise ConfigError(
            f"--replay={file}: step {record.step}, {wrong[0]}: spans are (version, tokens), with "
            f"versions that grow up to {record.step}. The file was changed; give the one that the run "
            "wrote."
        )


def _is_possible(spans: SpanLengths, step: int) -> bool:
    versions = [version for version, _ in spans]
    grows = sorted({*versions}) == versions and bool(versions) and versions[-1] <= step
    return grows and min(tokens for _, tokens in spans) >= 1


def _spans(group: DrawnGroup) -> Iterator[SpanLengths]:
    """Yield the spans of a group's samples and branches."""
    yield from (sample.spans for sample in group.samples)
    yield from (branch.spans for episode in group.episodes for branch in episode)
