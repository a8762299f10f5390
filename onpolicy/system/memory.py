"""How much memory new processes of this host may still take, and how such a number is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Bytes: what Linux calls available, or what a limit of this process's control group leaves.

    Pages of files that can be read again count as free. `root` has proc and sys in it.
    """
    return min([_available(root / "proc/meminfo"), *_left_in_groups(root)])


def _available(meminfo: Path) -> int:
    line = next(x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
    return int(line.split()[1]) << 10


def _left_in_groups(root: Path) -> Iterator[int]:
    """For every limit on this process: its group's, and those of the groups around it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(top):
                yield from _left(directory, *names)


def _left(group: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    numbers = _text(group / limit).strip(), _text(group / used).strip()
    if all(map(str.isdigit, numbers)):  # the limit may be "max"
        statistics = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        yield int(numbers[0]) - int(numbers[1]) + int(statistics.get(cached, 0))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def gib(size: int) -> str:
    """Bytes as a number of GiB. Example: '2.22'"""
    return f"{size / 2**30:.2f}"
