"""Which aligned operators a machine can keep, decided from facts that can be written down.

Nothing here imports a GPU library: `Machine.here` asks torch and the package metadata, everything
else is a function of its answer.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from onpolicy.contract import OperatorShapes
from onpolicy.errors import ConfigError

DISTRIBUTIONS = {"triton": "triton", "sgl_kernel": "sglang-kernel", "deep_gemm": "sgl-deep-gemm"}
"""Modules that the GPU operators import, and the packages they come in."""

FLASH_HEAD_DIMS = (96, 128, 192, 256)
"""Head sizes for which FlashAttention-3 sums over keys in blocks of one width, however few queries
there are, with a page table (kernels of sglang-kernel 0.4.5 and 0.4.7). With 64 it takes blocks of
192 keys for few queries and of 128 for many; other sizes are padded to one of these."""

GEMM_COLUMNS = 16
"""DeepGEMM multiplies by weights whose out features are a multiple of this, its narrowest tile."""

OLDEST_TRITON = (3, 6)
"""Comes with torch 2.11, the oldest that a supported SGLang runs on."""

INSTALL = "Install what is missing with: pip install -e '.[gpu]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides which operators can run here."""

    capability: tuple[int, int] | None
    """Compute capability of the GPU, None without one. Example: (9, 0)"""

    packages: Mapping[str, str]
    """Modules of DISTRIBUTIONS that are there, and their versions. Example: {"triton": "3.6.0"}"""

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        found = {name for name in DISTRIBUTIONS if importlib.util.find_spec(name) is not None}
        return Machine(capability=capability, packages={name: _version(name) for name in found})


def _version(module: str) -> str:
    try:
        return version(DISTRIBUTIONS[module])
    except PackageNotFoundError:
        return "unknown"


def choose_backend(
    operators: str, dtype: str, shapes: OperatorShapes, row_parallel_blocks: int, machine: Machine
) -> str:
    """The contract's backend for `--operators`: auto, triton or hopper.

    auto: `cpu` without a GPU; `hopper` on compute capability 9.0 for models that its kernels are made
    for; `triton` otherwise. A package that is missing never changes the choice. Raises ConfigError if
    the machine cannot keep the backend.
    """
    if machine.capability is None:
        if operators != "auto":
            raise ConfigError(
                f"--operators={operators}: this machine has no GPU, and the CPU has operators of its "
                "own. Leave it out."
            )
        return "cpu"
    backend = operators
    if operators == "auto":
        unfit = _refuse_hopper(dtype, shapes, row_parallel_blocks, machine.capability)
        backend = "triton" if unfit else "hopper"
    if problem := refusal(backend, dtype, shapes, row_parallel_blocks, machine):
        raise ConfigError(f"--operators={operators}: {problem}")
    return backend


def refusal(
    backend: str, dtype: str, shapes: OperatorShapes, row_parallel_blocks: int, machine: Machine
) -> str | None:
    """Why `machine` cannot keep a contract of a GPU backend, and what to do; None if it can."""
    if backend == "hopper":
        unfit = _refuse_hopper(dtype, shapes, row_parallel_blocks, machine.capability)
        return unfit or _refuse_missing(backend, ("sgl_kernel", "deep_gemm", "triton"), machine)
    return _refuse_triton(machine) or _refuse_missing(backend, ("triton",), machine)


def _refuse_triton(machine: Machine) -> str | None:
    if machine.capability is None or not (8, 0) <= machine.capability <= (9, 0):
        return (
            f"compute capability={_name(machine.capability)}: triton operators are made for GPUs of "
            "8.0 (A100) to 9.0 (H100, H200). Use such a GPU, or run without --true-on-policy-mode."
        )
    return None


def _refuse_hopper(
    dtype: str, shapes: OperatorShapes, row_parallel_blocks: int, capability: tuple[int, int] | None
) -> str | None:
    other = "Choose --operators triton."
    if capability != (9, 0):
        return (
            f"compute capability={_name(capability)}: hopper operators are made for 9.0 (H100, "
            f"H200). {other}"
        )
    if dtype != "bfloat16":
        return f"dtype={dtype}: hopper operators compute in bfloat16 only. {other}"
    if shapes.head_dim not in FLASH_HEAD_DIMS:
        return (
            f"head_dim={shapes.head_dim}: FlashAttention-3 gives a query the same bits in every "
            f"batch for head sizes {', '.join(map(str, FLASH_HEAD_DIMS))} only. {other}"
        )
    # Tensor parallelism shares out columns; the parts must take the kernel that the whole takes.
    multiple = GEMM_COLUMNS * row_parallel_blocks
    uneven = [n for n, _, _ in shapes.linear if n % multiple] if row_parallel_blocks > 1 else []
    if uneven:
        return (
            f"out_features={uneven[0]}: with up to {row_parallel_blocks} tensor-parallel ranks "
            f"DeepGEMM needs multiples of {multiple}. Lower the degree, or choose --operators triton."
        )
    return None


def _refuse_missing(backend: str, modules: tuple[str, ...], machine: Machine) -> str | None:
    for module in modules:
        if module not in machine.packages:
            return (
                f"{module} is missing, which {backend} operators call (package "
                f"{DISTRIBUTIONS[module]}, in the version that SGLang asks for). {INSTALL}"
            )
    numbers = re.match(r"(\d+)\.(\d+)", machine.packages["triton"])
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"triton=={machine.packages['triton']}: must be at least {oldest}. {INSTALL}"
    return None


def _name(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else ".".join(map(str, capability))
