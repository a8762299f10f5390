"""Page of the episodes that a run has written down: turns, tokens, branches, and why they ended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NotRequired
from urllib.parse import quote

from annotated_types import Len
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import write_output
from onpolicy.report.page import page_of
from onpolicy.report.runs import LoggedRun, malformed
from onpolicy.system.reading import parse_json
from onpolicy.system.records import checked

Record = dict[str, Any]
"""A line of a samples file (`outputs/samples.py`): a trajectory."""

Number = Annotated[float, Field(allow_inf_nan=False)]


class Turn(TypedDict):
    """The text that was given or sampled in one stretch."""

    sampled: bool
    text: str
    num_tokens: NotRequired[int]


class Line(TypedDict):
    """The fields of a line that the page reads."""

    step: int
    prompt_index: int
    sample: int
    prompt: str
    response: str
    label: str
    reward: Number | None
    finish_reason: str
    num_tokens: int
    mismatched_tokens: int | None
    # Fields of later versions, or of some episodes alone.
    trajectory: NotRequired[int]
    reward_parts: NotRequired[dict[str, Any] | None]
    metrics: NotRequired[dict[str, Any] | None]
    info: NotRequired[dict[str, Any] | None]
    tokens: NotRequired[dict[str, Any] | None]
    turns: NotRequired[list[Turn] | None]
    forks: NotRequired[list[Annotated[list[Any], Len(2, 2)]] | None]
    is_unscored: NotRequired[bool]
    failed: NotRequired[str]
    message: NotRequired[str]
    attempt: NotRequired[int]


_SHAPE = TypeAdapter(Line)

FAULTS = re.compile("fault|refused|given_up|drift|error|timeout|timed_out")
"""Names of an episode's metrics and infos that report faults."""


def render(data: Record) -> str:
    """Return the page as HTML."""
    styles, scripts = ("page.css", "episodes.css"), ("elements.js", "episodes.js")
    return page_of("episodes.html", styles, scripts, data)


def read_episodes(run: str, rollouts: int) -> Record:
    """Return the page's data as JSON values, for the last `rollouts` rollouts and evaluations with
    samples, failed attempts included.

    Raises ConfigError for a directory that is no run, and for a line that cannot be read.
    """
    directory = Path(run)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"RUN={run}: has no config.json. Give the --run-dir of a run.")
    samples = (directory / "samples").glob("*.jsonl")
    files = sorted(samples, key=lambda file: (_step(file), _where(file), file))
    places = [*dict.fromkeys((_step(file), _where(file)) for file in files)]
    kept = places[-rollouts:]
    shown = [file for file in files if (_step(file), _where(file)) in kept]
    found = [episode for file in shown for episode in _episodes(file)]
    version = blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()
    left_out = len(places) - len(kept)
    return {"run": directory.name, "version": version, "left_out": left_out, "episodes": found}


def write_pages(runs: Sequence[LoggedRun], report: Path, rollouts: int) -> dict[str, str]:
    """Write a page beside a report for each run with episodes; return the links to them, by the
    run's name.

    Raises ConfigError for a page that cannot be written, and for a line that cannot be read.
    """
    links = {}
    for number, run in enumerate(runs, start=1):
        directory = run.directory if run.config is not None else None
        if directory is not None and (directory / "samples").is_dir():
            file = report.with_name(f"{report.stem}.episodes-{number}.html")
            page = render(read_episodes(str(directory), rollouts))
            write_output("--episodes", str(file), page)
            links[run.name] = quote(file.name)
    return links


def _step(file: Path) -> int:
    number = file.stem.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def _where(file: Path) -> str:
    """Return the rollout's or evaluation's name. Example: 'rollout'; 'eval_aime'"""
    return file.stem.rpartition("_")[0].removeprefix("failed_")


def _episodes(file: Path) -> Iterator[Record]:
    """Yield the episodes of a file; an episode's trajectories are adjacent, and the first has
    number 0."""
    together: list[Record] = []
    for record in _records(file):
        if together and not record.get("trajectory"):
            yield _episode(file, together)
            together = []
        together.append(record)
    if together:
        yield _episode(file, together)


def _records(file: Path) -> Iterator[Record]:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            record = parse_json(line.decode())
        except ValueError as error:
            raise malformed(file, number, f"not JSON ({error})") from error
        try:
            checked(_SHAPE, record)
        except ValueError as error:
            raise malformed(file, number, str(error)) from error
        yield record


def _episode(file: Path, records: Sequence[Record]) -> Record:
    first = records[0]
    where = f"{_where(file)} {first['step']}"
    said = {**(first.get("metrics") or {}), **(first.get("info") or {})}
    faults = [name for name, value in said.items() if value and FAULTS.search(name)]
    faults += ["truncated"] * any(record["finish_reason"] == "length" for record in records)
    faults += ["mismatched"] * any(record["mismatched_tokens"] for record in records)
    trajectories = [_trajectory(record) for record in records]
    facts = {"label": first["label"], **(first.get("reward_parts") or {}), **said}
    key = f"{where}, prompt {first['prompt_index']}, sample {first['sample']}"
    faults += ["unscored"] * any(record.get("is_unscored", False) for record in records)
    rewards = [record["reward"] for record in records]
    has_failed = "failed" in first
    if has_failed:
        faults, facts = [f"failed: {first['failed']}"], {**facts, "failed": first["message"]}
        key += f", attempt {first['attempt']}"
    return {
        "key": key,
        "where": where,
        "reward": None if None in rewards else fmean(rewards),
        "num_tokens": sum(record["num_tokens"] for record in records),
        "num_turns": sum(turn["sampled"] for each in trajectories for turn in each["turns"]),
        "faults": faults,
        "has_failed": has_failed,
        "facts": [[name, _told(value)] for name, value in facts.items()],
        "trajectories": trajectories,
    }


def _trajectory(record: Record) -> Record:
    return {
        "reward": record["reward"],
        "finish_reason": record["finish_reason"],
        "mismatched": record["mismatched_tokens"],
        "turns": list(_turns(record)),
    }


def _turns(record: Record) -> Iterator[Record]:
    """Yield given text whole, and sampled text token by token."""
    tokens = record.get("tokens") or {}
    turns = record.get("turns") or [
        {"sampled": False, "text": record["prompt"], "num_tokens": 0},
        {"sampled": True, "text": record["response"], "num_tokens": record["num_tokens"]},
    ]
    drifts = (record.get("info") or {}).get("gateway/drifts", {})
    key, length = (record.get("forks") or [(None, None)])[-1]
    ends = accumulate(turn.get("num_tokens", 0) for turn in turns)
    start = 0
    for turn, end in zip(turns, ends, strict=True):
        count = turn.get("num_tokens", 0)
        shown = {"sampled": turn["sampled"], "text": turn["text"]}
        if turn["sampled"] and tokens:
            shown |= {name: _part(each, start, count) for name, each in tokens.items()}
            start += count
        if length is not None and end - count == length:
            shown["branch"] = f"branch {key} begins here, after {length} tokens"
            if (why := drifts.get(key)) is not None:
                shown["branch"] += f", since its chat template writes the past anew ({why})"
        yield shown


def _part(column: Any, start: int, count: int) -> Any:
    return column[start : start + count] if isinstance(column, list) else column


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
