"""The evaluation sets behind --eval-prompt-data: one path, or names and paths as in slime and Miles."""

from __future__ import annotations

import re
from collections.abc import Sequence

from onpolicy.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_FILES = (".jsonl", ".parquet")


def eval_sets(values: Sequence[str]) -> dict[str, str]:
    """The path of every evaluation set under its name; the name of a single path is empty.

    Raises ConfigError for what is neither one path nor pairs of a name and a path.
    """
    if len(values) == 1:
        return {"": values[0]}
    if len(values) % 2:
        _refuse(values, f"{len(values)} values are neither one path nor names with their paths")
    names = values[::2]
    for name in names:
        if not _NAME.fullmatch(name) or name.endswith(_FILES):
            _refuse(values, f"{name!r} stands where the name of a set is expected")
    if len(set(names)) < len(names):
        _refuse(values, "two sets have the same name")
    return dict(zip(names, values[1::2], strict=True))


def _refuse(values: Sequence[str], rule: str) -> None:
    raise ConfigError(
        f"--eval-prompt-data={' '.join(values)}: {rule}. Give one path, or: name path [name path ...], "
        "where a name is letters, digits and _ . + -"
    )
