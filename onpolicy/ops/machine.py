"""The facts about a machine that determine which operators it can keep.

Among them is the CUDA compiler for DeepGEMM's kernels: where it is, and whether it can be used.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onpolicy.contract import VARIABLES

logger = logging.getLogger(__name__)

DISTRIBUTIONS = {"triton": "triton", "sgl_kernel": "sglang-kernel", "deep_gemm": "sgl-deep-gemm"}
"""Modules that the GPU operators, or SGLang with them, import, and their packages."""

OLDEST = {"triton": (3, 6)}
"""Oldest usable versions. Triton's comes with torch 2.11, the oldest that its operators are tested
with."""

COMPILED_HERE = frozenset({"deep_gemm"})
"""Modules whose kernels are compiled on first use, with a CUDA toolkit."""

ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN from using later instruction sets."""

WITHOUT_BFLOAT16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of ONEDNN_LIMITS below AVX512_CORE_BF16."""

WITHOUT_AMX = WITHOUT_BFLOAT16 | {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}
"""Values of ONEDNN_LIMITS below AVX512_CORE_AMX."""

INSTALL = "Install what is missing with: pip install -e '.[gpu]'"


@dataclass(frozen=True, slots=True)
class CudaToolkit:
    """A toolkit, or the reason why none can compile."""

    home: str | None
    """Path, such as /usr/local/cuda"""

    problem: str = ""
    """Reason, such as: CUDA_HOME=/usr/local/cuda has no executable bin/nvcc"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts that determine which operators can run here."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU, None without one. Example: (9, 0)"""

    packages: Mapping[str, str]
    """Installed modules of DISTRIBUTIONS, and their versions. Example: {"triton": "3.6.0"}"""

    cuda_toolkit: CudaToolkit = field(
        default_factory=lambda: CudaToolkit(None, "none was looked for")
    )
    """Toolkit that compiles kernels."""

    bfloat16_products: bool = False
    """Whether oneDNN multiplies bfloat16 on this CPU by instructions made for it."""

    cpu_kernels: str = ""
    """Kind of PyTorch's kernels on this CPU. Example: AVX512"""

    asked_kernels: Mapping[str, str] = field(default_factory=dict)
    """Variables of VARIABLES that are set. Example: {"MKL_CBWR": "AUTO,STRICT"}"""

    @staticmethod
    def here() -> Machine:
        """Return the facts about the machine that this process runs on."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        found = {name for name in DISTRIBUTIONS if importlib.util.find_spec(name) is not None}
        return Machine(
            capability=capability,
            packages={name: _version(name) for name in found},
            cuda_toolkit=find_cuda_toolkit(),
            bfloat16_products=_multiplies_bfloat16(os.environ),
            cpu_kernels=torch.backends.cpu.get_cpu_capability(),
            asked_kernels={
                x: os.environ[x] for asked in VARIABLES.values() for x in asked if x in os.environ
            },
        )

    @property
    def capability_name(self) -> str:
        """Return the compute capability as text, such as 9.0, or "none"."""
        return "none" if self.capability is None else ".".join(map(str, self.capability))

    def lacks(self, backend: str, modules: Sequence[str]) -> str | None:
        """Return which of `modules` `backend` lacks or has too old, and the remedy; None if none."""
        for module in modules:
            if module not in self.packages:
                return (
                    f"{module} is missing, which {backend} operators call (package "
                    f"{DISTRIBUTIONS[module]}, in the version that SGLang asks for). {INSTALL}"
                )
            if module in COMPILED_HERE and self.cuda_toolkit.home is None:
                return (
                    f"there is no CUDA toolkit with which {module} could compile the kernels of "
                    f"{backend} operators ({self.cuda_toolkit.problem}). {REMEDY}"
                )
        for module in OLDEST.keys() & set(modules):
            oldest, numbers = OLDEST[module], re.match(r"(\d+)\.(\d+)", self.packages[module])
            if numbers and tuple(map(int, numbers.groups())) < oldest:
                wanted = ".".join(map(str, oldest))
                return f"{module}=={self.packages[module]}: must be at least {wanted}. {INSTALL}"
        return None


def _multiplies_bfloat16(environment: Mapping[str, str]) -> bool:
    import torch

    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and not WITHOUT_BFLOAT16.intersection(_onednn_limits(environment))


def multiplies_with_amx(environment: Mapping[str, str]) -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU by AMX instructions."""
    import torch

    hidden = WITHOUT_AMX.intersection(_onednn_limits(environment))
    return torch.cpu._is_amx_tile_supported() and not hidden


def _onednn_limits(environment: Mapping[str, str]) -> list[str]:
    return [environment.get(name, "").upper() for name in ONEDNN_LIMITS]


def _version(module: str) -> str:
    try:
        return version(DISTRIBUTIONS[module])
    except PackageNotFoundError:
        return "unknown"


OLDEST_NVCC = (12, 9)
"""Oldest version that sgl-deep-gemm 0.2 accepts."""

WHEELS = "cu13"
"""Folder of the package `nvidia` with the compiler of the extra `gpu`, for a PyTorch of CUDA 13."""

USUAL = Path("/usr/local/cuda")

PLACES = "CUDA_HOME, the packages of the extra gpu, PATH and /usr/local/cuda"

REMEDY = (
    "Install nvcc with: pip install -e '.[gpu]', and g++ with the system's own packages; or set "
    "CUDA_HOME to a toolkit of the version that torch was built with; or choose --operators triton."
)


def find_cuda_toolkit() -> CudaToolkit:
    """Find the CUDA toolkit.

    If CUDA_HOME or CUDA_PATH is set, only that one counts, unless it compiles nothing, or only CUDA 12,
    and the extra's packages can; else it is the first that compiles of: the extra's packages, PATH,
    /usr/local/cuda. DeepGEMM does not search the extra's packages, so it gets the result as CUDA_HOME.
    """
    given = [name for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if given:
        home = Path(os.environ[given[0]])
        ours = next((each for each in _wheels() if not _problem(each)), None)
        problem = _problem(home, (13, 0) if ours else OLDEST_NVCC)
        if problem and ours:
            _say_replaced(f"{given[0]}={problem}", ours)
            return CudaToolkit(str(ours))
        return CudaToolkit(None if problem else str(home), problem and f"{given[0]}={problem}")
    problems = []
    for home in _homes():
        problem = _problem(home)
        if not problem:
            return CudaToolkit(str(home))
        problems.append(problem)
    return CudaToolkit(None, "; ".join(problems) or f"none is at {PLACES}")


@functools.cache
def _say_replaced(problem: str, ours: Path) -> None:
    logger.warning("%s: kernels are compiled with %s of the extra gpu instead", problem, ours)


def _wheels() -> list[Path]:
    nvidia = importlib.util.find_spec("nvidia")
    packages = [] if nvidia is None else nvidia.submodule_search_locations or []
    return [Path(package) / WHEELS for package in packages]


def _homes() -> Iterator[Path]:
    """Yield existing folders, some of which may hold only libraries."""
    compiler = shutil.which("nvcc")
    on_path = [Path(compiler).parents[1]] if compiler else []
    for home in (*_wheels(), *on_path, USUAL):
        if home.is_dir():
            yield home


def _problem(home: Path, oldest: tuple[int, int] = OLDEST_NVCC) -> str:
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
    if tuple(map(int, release.groups())) < oldest:
        wanted = ".".join(map(str, oldest))
        return f"{nvcc} is of release {'.'.join(release.groups())}, and at least {wanted} is needed"
    if shutil.which("g++") is None:
        return f"{nvcc} needs g++, which is not on PATH"
    return ""
