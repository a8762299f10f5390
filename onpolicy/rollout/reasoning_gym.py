"""Problems that the reasoning-gym package makes: `--prompt-data reasoning-gym:NAME[,NAME]`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from onpolicy.config.groups.inputs import PROCEDURAL
from onpolicy.errors import ConfigError, in_one_line
from onpolicy.rollout.data_files import Row
from onpolicy.rollout.seeds import sampling_seed

BY_HASH_SEED = {
    "codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note",
    "word_ladder",
}  # fmt: skip
"""Datasets of 0.1.25 that walk over sets of texts, whose order another process has otherwise."""

NOT_JSON = {"arc_agi", "rearc"}
"""Those whose scorers compare tuples, which no JSON holds."""


def is_procedural(source: str) -> bool:
    """Whether a source of prompts is no file, but names of datasets that the package makes."""
    return source.startswith(PROCEDURAL)


def rows_of(source: str, size: int, seed: int, flag: str) -> Iterator[Row]:
    """`size` problems of each of the datasets that are named: the question, and as its label all that
    the package's scorer needs, as JSON.

    Problem i of a dataset is a function of (seed, flag, name, i): each is made alone, since some
    datasets make one of those before it. Raises ConfigError for an unknown name, and for a dataset whose
    problems are not the same in every process.
    """
    name_of_source = f"{flag}={source}"
    make, known = _package(name_of_source)
    for name in source.removeprefix(PROCEDURAL).split(","):
        _require_usable(name, known, name_of_source)
        for i in range(size):
            where = f"{name_of_source}: {name} {i}"
            own_seed = sampling_seed(seed, "reasoning-gym", flag, name, i) % 2**32
            try:
                problem = make(name, seed=own_seed, size=1)[0]
                label = json.dumps({"name": name, **problem}, sort_keys=True)
            except Exception as error:  # whatever its hundred datasets raise
                raise ConfigError(
                    f"{where}: reasoning-gym cannot make it ({in_one_line(error)}). Choose another."
                ) from error
            yield where, {"prompt": problem["question"], "label": label}


def _package(name: str) -> tuple[Any, set[str]]:
    """What makes a dataset, and the names that it knows."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"{name}: the package reasoning-gym cannot be imported ({in_one_line(error)}). Install it "
            "with pip install 'onpolicy[reasoning-gym]'."
        ) from error
    return create_dataset, {*DATASETS} - {"composite"}


def _require_usable(name: str, known: set[str], source: str) -> None:
    if name not in known:
        raise ConfigError(
            f"{source}: reasoning-gym has no dataset {name!r}. Known: {', '.join(sorted(known))}."
        )
    if name in NOT_JSON:
        raise ConfigError(
            f"{source}: the scorer of {name} compares what JSON does not hold. Choose another dataset."
        )
    if name in BY_HASH_SEED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{source}: the problems of {name} are others in every process, since its order of texts "
            "goes by Python's hashes. Set PYTHONHASHSEED=0, or choose another dataset."
        )
