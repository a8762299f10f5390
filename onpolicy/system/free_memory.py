"""The memory of this host and its GPUs that is free for new processes, and its unit in messages."""

import runpy
import sys
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that Linux calls available, or that the limits of this process's control groups
    leave. File pages that can be read again count as free. root: what contains proc and sys."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable:"))
    return min([int(available.split()[1]) << 10, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left under every limit on this process: its control group's, and all parents'."""
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
    """Return bytes as a number of GiB. Example: '2.22'"""
    return f"{size / 2**30:.2f}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, whose number is its index for processes of its host."""

    name: str

    capability: tuple[int, int]
    """The compute capability. Example: (9, 0)"""

    free: int
    """The bytes that new processes may take."""

    size: int


def num_gpus() -> int:
    """Return the number of GPUs that PyTorch sees, without a CUDA context. Where its build or a
    missing driver leaves none, PyTorch is not imported, which takes a second."""
    if "torch" not in sys.modules and _sees_none():
        return 0
    import torch

    return torch.cuda.device_count()


def _sees_none() -> bool:
    """Return whether the PyTorch here is a build for CPUs, or one for CUDA without CUDA's driver."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    build = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    try:
        return not build.get("hip") and (not build.get("cuda") or not CDLL("libcuda.so.1"))
    except OSError:
        return True


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that PyTorch sees, by number; create a CUDA context on each."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        Gpu(
            name=torch.cuda.get_device_name(number),
            capability=torch.cuda.get_device_capability(number),
            free=torch.cuda.mem_get_info(number)[0],
            size=torch.cuda.get_device_properties(number).total_memory,
        )
        for number in range(torch.cuda.device_count())
    )
