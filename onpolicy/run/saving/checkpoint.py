"""A checkpoint on disk: its name, its record, and the check that it is complete.

The record holds a digest of every file, so `read` notices files that are not as they were written. A
link names the best checkpoint by an evaluation (`better`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from onpolicy.config.groups import OutputConfig
from onpolicy.config.settings import DECIDE_NO_RESULT
from onpolicy.config.sft_flags import AnyRun
from onpolicy.errors import CheckpointError, ConfigError
from onpolicy.outputs.directory import versions
from onpolicy.outputs.totals import RunTotals
from onpolicy.system import files
from onpolicy.system.files import read_json_object
from onpolicy.system.records import Count, Shape
from onpolicy.system.user_functions import source_of
from onpolicy.types import Prompt

logger = logging.getLogger(__name__)

Digests = dict[str, str]
"""The type of digests: `<bytes> <xxh3_128>` by path inside the directory."""

STATE = "state.json"
SHOWN = 10
"""The number of damaged files that an error lists before it counts the others."""

LINK = "best"
"""The name of the link to the best checkpoint, beside the checkpoints."""

_NAME = re.compile("step_([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    directory: Path
    state: RunState

    config: dict[str, Any]
    """The result of `TrainConfig.to_dict` in the run that wrote it."""

    made_with: dict[str, Any]
    """The result of `made_with` in that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run, besides its trainer."""

    rollouts_done: Count
    run_hash: str
    totals: RunTotals

    governor: dict[str, Any]
    """The result of `Ladder.state_dict`; empty without a governor."""

    learning_rate: dict[str, Any]
    """The result of `LearningRate.state_dict`."""

    prompts: str
    """The result of `digest_prompts` for the training prompts; the position is `rollouts_done`."""

    evaluations: Mapping[str, str]
    """The result of `digest_sets` for the evaluation sets."""

    weights: str | None = None
    """The digest of the last push; None if there was none."""

    best: Best | None = None
    """The best by --save-best-metric; None without the flag, or before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far of saved weights; the first of equal ones."""

    rollouts_done: Count
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record(RunState):
    """The content of `state.json`, without its digest."""

    config: dict[str, Any]
    made_with: dict[str, Any]
    files: Digests


_SHAPE = Shape(_Record)


def made_with(config: AnyRun) -> dict[str, Any]:
    """Return package versions, the number of trainer ranks, and digests of the user's own function
    files, without their imports (`<path> xxh3_128:<digest>`)."""
    digests_of = {
        name: f"{path} xxh3_128:{xxhash.xxh3_128_hexdigest(file.read_bytes())}"
        for name, path in config.to_dict().items()
        if path and names_code(name) and (file := source_of(path)) is not None
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
        digest.update("".join(image.digest for image in prompt.images).encode())
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


def make_record(
    directory: Path, state: RunState, config: dict[str, Any], made_with: dict[str, Any]
) -> str:
    """Return the content of `state.json` for the files in the directory."""
    known = {field.name: getattr(state, field.name) for field in fields(state)}
    found = take(directory)
    record = _SHAPE.values(_Record(**known, config=config, made_with=made_with, files=found))
    return json.dumps({**record, "digest": _digest(record)}, indent=2)


def read(directory: Path) -> Checkpoint:
    """Check every byte of a checkpoint, and read its record. Raises CheckpointError."""
    read_record = _read_record(directory / STATE)
    try:
        record = _SHAPE.take(read_record)
    except ValueError as error:
        raise CheckpointError(
            f"{STATE}: {error}; another version wrote it, which can resume it"
        ) from error
    try:
        problems = compare(directory, record.files, but=[STATE])
    except (OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"cannot be read ({error})") from error
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError("; ".join(problems[:SHOWN]) + more)
    if number_of(directory) not in (None, record.rollouts_done):
        raise CheckpointError(f"{STATE}: is that of {name_of(record.rollouts_done)}")
    state = RunState(**{field.name: getattr(record, field.name) for field in fields(RunState)})
    given = {"config": record.config, "made_with": record.made_with}
    return Checkpoint(directory=directory, state=state, **given)


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


def better(
    output: OutputConfig, best: Best | None, rollouts_done: int, metrics: Mapping[str, float]
) -> Best | None:
    """Return the best evaluation, given the `metrics` after `rollouts_done` rollouts; weights that were
    not saved are never the best. A new best is logged, and the link is moved to it atomically."""
    metric, saved = output.save_best_metric, Path(output.save) / name_of(rollouts_done)
    if not metric or not saved.is_dir():
        return best
    if (value := metrics.get(metric)) is None:
        if any(name.rpartition("/")[0] == metric.rpartition("/")[0] for name in metrics):
            logger.warning("--save-best-metric=%s: step %d has none", metric, rollouts_done)
        return best
    if best is not None and value <= best.value:
        return best
    link, new = saved.with_name(LINK), saved.with_name(f".partial_{LINK}")
    new.unlink(missing_ok=True)
    new.symlink_to(saved.name)
    new.replace(link)
    files.sync(link.parent)
    logger.info("%s %.4g is the best so far: %s", metric, value, saved)
    return Best(rollouts_done=rollouts_done, value=value)


def take(directory: Path, but: Iterable[str] = ()) -> Digests:
    """Return the digests of all files but those named; 3.8 GB/s from memory on one core of an AMD
    EPYC. xxh3 is no cryptographic hash: it guards against damage, not against an attacker."""
    names = sorted(_files(directory) - set(but))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: _digest_of_file(directory / name), names)
        return dict(zip(names, digests, strict=True))


def compare(directory: Path, recorded: Mapping[str, str], but: Iterable[str] = ()) -> list[str]:
    """Return the differences between files and their recorded digests, in words."""
    found = _files(directory) - set(but)
    problems = [f"{name}: missing" for name in sorted(recorded.keys() - found)]
    problems += [f"{name}: not of the checkpoint" for name in sorted(found - recorded.keys())]
    in_both = {name: recorded[name] for name in found & recorded.keys()}
    return problems + _changed(directory, in_both)


def _changed(directory: Path, recorded: Mapping[str, str]) -> list[str]:
    """Return the files that changed, in words. Sizes are compared first, since they cost nothing."""
    problems = []
    for name, digest in sorted(recorded.items()):
        size, written = (directory / name).stat().st_size, int(digest.split()[0])
        if size != written:
            problems.append(f"{name}: {size} bytes, {written} were written")
    if problems:
        return problems
    now = take(directory, but=_files(directory) - recorded.keys())
    changed = [name for name in now if now[name] != recorded[name]]
    return [f"{name}: not the bytes that were written" for name in changed]


def _files(directory: Path) -> set[str]:
    found = (path for path in directory.rglob("*") if not path.is_dir())
    return {path.relative_to(directory).as_posix() for path in found}


def _digest_of_file(file: Path) -> str:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, xxhash.xxh3_128)
    return f"{file.stat().st_size} {digest.hexdigest()}"


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
    """Return the checkpoint at `path`: a Hugging Face checkpoint, one of ours, or the latest one in
    a directory of checkpoints or of a run. Every byte of one of ours is checked. Raises ConfigError
    if there is none, or if it is damaged."""
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
    """Return the latest checkpoint in a directory, or of the run whose directory it is. Raises
    ConfigError for a run that saved none."""
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
