"""The file of `make soak`: a part for each machine and set of versions, with every kill under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NotRequired

from pydantic import TypeAdapter, with_config
from typing_extensions import TypedDict

from onpolicy.system.records import CLOSED, checked


@with_config(CLOSED)
class Kill(TypedDict):
    """One run: how it was laid out, who was killed when, and what came of it."""

    number: int
    hosts: int
    ranks: int
    engines: int
    weight_sync: str
    rank_restarts: int
    schedule: NotRequired[str]
    """Of SCHEDULES; plain if it is not there."""

    agents: NotRequired[bool]
    """Whether a function of agents had the word; not if it is not there."""

    victim: str
    which: int
    phase: str
    rollouts_done: int
    after: float
    signal: NotRequired[str]
    """KILL if it is not there."""

    struck: bool
    exit_codes: list[int]
    engine_restarts: int
    left_behind: list[str]
    hash_is_equal: bool
    seconds: int


@with_config(CLOSED)
class Undisturbed(TypedDict):
    """A run that nobody disturbs: its hash, and how long its phases took."""

    hash: str
    seconds: dict[str, float]


@with_config(CLOSED)
class Part(TypedDict):
    """What ran under the same versions; `undisturbed` by schedule, with or without agents; in
    older parts by the number of ranks."""

    versions: dict[str, str]
    undisturbed: dict[str, Undisturbed]
    kills: list[Kill]


@with_config(CLOSED)
class Soaked(TypedDict):
    """All parts, which have the kills of one seed from number 0 on, of runs that all train adapters of
    this rank, or all weights (0)."""

    seed: int
    lora_rank: int
    parts: list[Part]


SHAPE = TypeAdapter(Soaked)


class SoakRecord:
    """A file that is written after each kill, and read back by the call that goes on after the last."""

    def __init__(self, file: Path, seed: int, versions: dict[str, str], lora_rank: int = 0):
        """Raises ValueError if the file is no such record, or one of another seed or rank."""
        self.file = file
        self.soaked: Soaked = {"seed": seed, "lora_rank": lora_rank, "parts": []}
        if file.exists():
            self.soaked = _read(file, seed, lora_rank)
        parts = self.soaked["parts"]
        if not parts or parts[-1]["versions"] != versions:
            parts.append({"versions": versions, "undisturbed": {}, "kills": []})
        self.part = parts[-1]

    @property
    def kills(self) -> list[Kill]:
        """Those of all parts."""
        return [kill for part in self.soaked["parts"] for kill in part["kills"]]

    def write(self) -> None:
        self.file.write_text(json.dumps(self.soaked, indent=1) + "\n")


def _read(file: Path, seed: int, lora_rank: int) -> Soaked:
    try:
        soaked = checked(SHAPE, json.loads(file.read_text()))
    except ValueError as error:
        raise ValueError(
            f"{file}: is no record of a soak ({error}). Name another file, or remove it."
        ) from error
    if soaked["seed"] != seed:
        raise ValueError(
            f"--seed={seed}: {file} has the kills of seed {soaked['seed']}. Give that, or another file."
        )
    if soaked["lora_rank"] != lora_rank:
        raise ValueError(
            f"--lora-rank={lora_rank}: {file} has runs of --lora-rank {soaked['lora_rank']}. Give that, "
            "or another file."
        )
    numbers = [kill["number"] for part in soaked["parts"] for kill in part["kills"]]
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"{file}: kills have the numbers {numbers}, and each comes after the one before. Remove it."
        )
    return soaked
