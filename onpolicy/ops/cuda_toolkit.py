"""The CUDA compiler for DeepGEMM's kernels: its location, and whether it is usable."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST_NVCC = (12, 9)
"""Oldest version that sgl-deep-gemm 0.2 accepts."""

WHEELS = "cu13"
"""Folder of the package `nvidia` that holds the compiler installed by the extra `gpu`."""

USUAL = Path("/usr/local/cuda")

PLACES = "CUDA_HOME, the packages of the extra gpu, PATH and /usr/local/cuda"

REMEDY = (
    "Install nvcc with: pip install -e '.[gpu]', and g++ with the system's own packages; or set "
    "CUDA_HOME to a toolkit of the version that torch was built with; or choose --operators triton."
)


@dataclass(frozen=True, slots=True)
class CudaToolkit:
    """A toolkit, or the reason why none can compile."""

    home: str | None
    """Path, such as /usr/local/cuda"""

    problem: str = ""
    """Reason, such as: CUDA_HOME=/usr/local/cuda has no executable bin/nvcc"""


def find_cuda_toolkit() -> CudaToolkit:
    """Find the CUDA toolkit.

    If CUDA_HOME or CUDA_PATH is set, only that one counts; otherwise it is the first that compiles
    of: the extra's packages, PATH, /usr/local/cuda. DeepGEMM does not search the extra's packages,
    so it gets the result as CUDA_HOME.
    """
    given = [name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if given:
        home = Path(os.environ[given[0]])
        problem = _problem(home)
        return CudaToolkit(None if problem else str(home), problem and f"{given[0]}={problem}")
    problems = []
    for home in _homes():
        problem = _problem(home)
        if not problem:
            return CudaToolkit(str(home))
        problems.append(problem)
    return CudaToolkit(None, "; ".join(problems) or f"none is at {PLACES}")


def _homes() -> Iterator[Path]:
    """Yield existing folders, some of which may hold only libraries."""
    nvidia = importlib.util.find_spec("nvidia")
    packages = [] if nvidia is None else nvidia.submodule_search_locations or []
    compiler = shutil.which("nvcc")
    on_path = [Path(compiler).parents[1]] if compiler else []
    for home in (*(Path(x) / WHEELS for x in packages), *on_path, USUAL):
        if home.is_dir():
            yield home


def _problem(home: Path) -> str:
    """Return why nothing can be compiled with the toolkit at `home`; empty if it can."""
    nvcc = home / "bin" / "nvcc"
    if not os.access(nvcc, os.X_OK):
        return f"{home} has no executable bin/nvcc"
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        return f"{nvcc} cannot be run ({error})"
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release is None:
        return f"{nvcc} --version names no release"
    if tuple(map(int, release.groups())) < OLDEST_NVCC:
        wanted = ".".join(map(str, OLDEST_NVCC))
        return f"{nvcc} is of release {'.'.join(release.groups())}, and at least {wanted} is needed"
    if shutil.which("g++") is None:
        return f"{nvcc} needs g++, which is not on PATH"
    return ""
