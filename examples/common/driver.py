"""A driver of a study's runs, one after the other; a recorded run is not repeated."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from shutil import which
from typing import Any, Protocol, TypeVar

from onpolicy.system import files

ROOT = Path(__file__).resolve().parents[2]


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

    It can be ended and called again at any time, if `carry_out` records a run as a whole. After
    --hours no further run begins.
    """
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--list", action="store_true", help="say what is recorded, and end")
    parser.add_argument("--hours", type=float, default=float("inf"), help="begin no run after them")
    args = parser.parse_args()
    for run in chosen(plan, args.only):
        recorded = is_recorded(run)
        if args.list:
            print(run.name, "recorded" if recorded else "not run")
        elif not recorded and time.monotonic() - began < args.hours * 3600:
            carry_out(run)


def drive_into(
    file: Path, description: str, plan: Iterable[Run], carry_out: Callable[[Run], None]
) -> None:
    """As `drive`, of a study whose records are the lines of one file (`add_record`)."""
    drive(description, plan, lambda run: run.name in read_records(file), carry_out)


def chosen(plan: Iterable[Run], patterns: Iterable[str]) -> list[Run]:
    """The runs whose names match, in the order of the patterns."""
    runs = list(plan)
    return list(dict.fromkeys(r for pattern in patterns for r in runs if fnmatch(r.name, pattern)))


def read_records(file: Path) -> dict[str, dict[str, Any]]:
    """{name of a run: its record}, in the order of the plan; empty before the first."""
    return json.loads(file.read_text()) if file.exists() else {}


def add_record(file: Path, plan: Iterable[Run], run: Run, record: dict[str, Any]) -> None:
    """Adds a run's record to a file that has a line for each, in the order of the plan."""
    records = read_records(file) | {run.name: record}
    names = [each.name for each in plan if each.name in records]
    lines = [f"  {json.dumps(name)}: {json.dumps(records[name])}" for name in names]
    files.write(file, "{\n" + ",\n".join(lines) + "\n}\n")


def surroundings(start: float) -> dict[str, str]:
    """When a run began, on which processor, and from which revision of the sources."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    named = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(describe, capture_output=True, text=True) if which("git") else None
    return {
        "started": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
        "machine": next(named, platform.processor()),
        "revision": done.stdout.strip() if done else "",
    }
