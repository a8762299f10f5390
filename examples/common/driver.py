"""Carries out the runs of a study, one after the other; what is recorded is not run again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol, TypeVar


class Named(Protocol):
    """A run of a study."""

    @property
    def name(self) -> str:
        """No other run of the study has it."""


Run = TypeVar("Run", bound=Named)


def drive(
    description: str,
    plan: Iterable[Run],
    is_recorded: Callable[[Run], bool],
    carry_out: Callable[[Run], None],
) -> None:
    """The command line of a study: --only PATTERN ... chooses runs, --list says which are recorded.

    It can be ended and called again at any time, if `carry_out` records a run as a whole.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--list", action="store_true", help="say what is recorded, and end")
    args = parser.parse_args()
    for run in chosen(plan, args.only):
        recorded = is_recorded(run)
        if args.list:
            print(run.name, "recorded" if recorded else "not run")
        elif not recorded:
            carry_out(run)


def chosen(plan: Iterable[Run], patterns: Iterable[str]) -> list[Run]:
    """The runs whose names match, in the order of the patterns."""
    runs = list(plan)
    return list(dict.fromkeys(r for pattern in patterns for r in runs if fnmatch(r.name, pattern)))


def write_whole(file: Path, text: str) -> None:
    """The file has this text, or what it had before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)
