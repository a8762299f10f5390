"""A checkpoint on disk: its name, its record, and the check that it is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import xxhash
from annotated_types import Ge
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from onpolicy.config.settings import DECIDE_NO_RESULT
from onpolicy.config.sft import AnyRun
from onpolicy.errors import CheckpointError
from onpolicy.outputs.directory import versions
from onpolicy.outputs.totals import RunTotals
from onpolicy.run.saving import digests
from onpolicy.system.records import checked
from onpolicy.system.user_functions import source_of
from onpolicy.types import Prompt

STATE = "state.json"
SHOWN = 10
"""The number of damaged files that an error lists before it counts the others."""

_NAME = re.compile("step_([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far of saved weights; the first of equal ones."""

    rollouts_done: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run, besides its trainer."""

    rollouts_done: int
    run_hash: str
    totals: RunTotals

    governor: dict[str, Any]
    """The result of `Ladder.state_dict`."""

    learning_rate: dict[str, Any]
    """The result of `LearningRate.state_dict`."""

    prompts: str
    """The result of `digest_prompts` for the training prompts; the position is `rollouts_done`."""

    evaluations: Mapping[str, str] | None = None
    """The result of `digest_sets` for the evaluation sets; None from a version that did not store it."""

    weights: str | None = None
    """The digest of the last push; None if there was none."""

    best: Best | None = None
    """The best by --save-best-metric; None without the flag, or before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    directory: Path
    state: RunState

    config: dict[str, Any]
    """The result of `TrainConfig.to_dict` in the run that wrote it."""

    made_with: dict[str, Any]
    """The result of `made_with` in that run."""


class _Totals(TypedDict):
    first_reward: float
    last_reward: float
    num_compared_tokens: int
    num_mismatched_tokens: int
    num_unscored: NotRequired[int]
    num_repeats: NotRequired[int]


class _Best(TypedDict):
    rollouts_done: Annotated[int, Ge(0)]
    value: float


class _Record(TypedDict):
    """The fields of `state.json`, without its digest."""

    rollouts_done: Annotated[int, Ge(0)]
    run_hash: str
    totals: _Totals
    governor: dict[str, Any]
    learning_rate: dict[str, Any]
    prompts: str
    evaluations: NotRequired[dict[str, str]]
    weights: NotRequired[str]
    best: NotRequired[_Best]
    config: dict[str, Any]
    made_with: dict[str, Any]
    files: digests.Digests


_SHAPE = TypeAdapter(_Record)


def made_with(config: AnyRun) -> dict[str, Any]:
    """Return package versions, the number of trainer ranks, and digests of the user's own function
    files, without their imports (`<path> xxh3_128:<digest>`)."""
    given = config.to_dict()
    named = {name: path for name, path in given.items() if path and names_code(name)}
    own = {name: file for name, path in named.items() if (file := source_of(path)) is not None}
    digests_of = {
        name: f"{named[name]} xxh3_128:{xxhash.xxh3_128_hexdigest(file.read_bytes())}"
        for name, file in own.items()
    }
    return {**versions(), "trainer_ranks": config.cluster.num_ranks, **digests_of}


def names_code(name: str) -> bool:
    """Return whether a setting names the user's own code, which decides results."""
    is_own = name.startswith("custom_") and name.endswith("_path") and name not in DECIDE_NO_RESULT
    return is_own or name == "environment"


def digest_prompts(prompts: Sequence[Prompt]) -> str:
    """Return a digest of every field of the prompts that policy and rewards may read."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        read = (prompt.prompt_ids, prompt.label, prompt.text, prompt.metadata)
        digest.update(repr(read).encode())
    return digest.hexdigest()


def digest_sets(sets: Mapping[str, tuple[object, Sequence[Prompt]]]) -> dict[str, str]:
    """Return a digest of each evaluation set by name, of its settings and its prompts."""
    return {
        name: xxhash.xxh3_128_hexdigest(f"{measure!r} {digest_prompts(prompts)}".encode())
        for name, (measure, prompts) in sets.items()
    }


def name_of(rollouts_done: int) -> str:
    return f"step_{rollouts_done:06d}"


def number_of(directory: Path) -> int | None:
    """Return the number in a checkpoint directory's name; None for other names."""
    match = _NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def checkpoints(root: Path) -> dict[int, Path]:
    """Return the checkpoint directories under `root`, complete or not, by number, oldest first."""
    paths = sorted(root.iterdir()) if root.is_dir() else []
    numbered = {number: path for path in paths if (number := number_of(path)) is not None}
    return dict(sorted(numbered.items()))


def make_record(directory: Path, state: RunState, **about: Mapping[str, Any]) -> str:
    """Return the content of `state.json` for the files in the directory."""
    known = {name: value for name, value in asdict(state).items() if value is not None}
    record = {**known, **about, "files": digests.take(directory)}
    return json.dumps({**record, "digest": _digest(record)}, indent=2)


def read(directory: Path) -> Checkpoint:
    """Check every byte of a checkpoint, and read its record.

    Raises a CheckpointError that lists damaged, missing and unexpected files.
    """
    read_record = _read_record(directory / STATE)
    try:
        record = checked(_SHAPE, read_record)
    except ValueError as error:
        raise CheckpointError(
            f"{STATE}: {error}; another version wrote it, which can resume it"
        ) from error
    try:
        problems = digests.compare(directory, record["files"], but=[STATE])
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"cannot be read ({error})") from error
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError("; ".join(problems[:SHOWN]) + more)
    return _checkpoint(directory, record)


def _checkpoint(directory: Path, record: _Record) -> Checkpoint:
    state = RunState(
        rollouts_done=record["rollouts_done"],
        run_hash=record["run_hash"],
        totals=RunTotals(**record["totals"]),
        governor=record["governor"],
        learning_rate=record["learning_rate"],
        prompts=record["prompts"],
        evaluations=record.get("evaluations"),
        weights=record.get("weights"),
        best=Best(**best) if (best := record.get("best")) else None,
    )
    if number_of(directory) not in (None, state.rollouts_done):
        raise CheckpointError(f"{STATE}: is that of {name_of(state.rollouts_done)}")
    return Checkpoint(
        directory=directory, state=state, config=record["config"], made_with=record["made_with"]
    )


def _read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{STATE}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{STATE}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{STATE}: no object")
    if "digest" not in record:
        raise CheckpointError(
            f"{STATE}: holds no digests, so that nobody can tell whether the files are those that "
            "were written; an earlier version wrote it, which can resume it"
        )
    if record.pop("digest") != _digest(record):
        raise CheckpointError(f"{STATE}: not the bytes that were written")
    return record


def _digest(record: Mapping[str, Any]) -> str:
    """Return the digest of a record as its JSON is read back."""
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())
