"""Settings that a computing process needs from its libraries, most of which read a variable once."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from contextlib import suppress

from onpolicy.compat.torchvision_on_cpu import let_torchvision_import
from onpolicy.contract import VARIABLES
from onpolicy.errors import ConfigError
from onpolicy.system.network import proxy_exceptions

STRICT_SUMS = ("MKL_CBWR", "AUTO,STRICT")
"""The strict mode of MKL, else it sums in another order for few rows on Intel CPUs (from AVX2 on)."""

PATIENT_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""The sleeping mode of waiting threads; spinning ones take the engines' cores (7 times slower)."""


NCCL_MEMORY = ("NCCL_CUMEM_ENABLE", "0")
"""The NCCL setting that SGLang uses in its processes and that all members of a group must share; read
when the group is made (sglang/srt/entrypoints/engine.py, _set_envs_and_config)."""

OWN_FUNCTIONS = ("USE_HUB_KERNELS", "NO")
"""The switch that keeps transformers' own functions: with the package `kernels`, which SGLang requires,
it wraps functions that a Hub kernel may replace. Read when transformers is imported."""

KERNEL_CACHES = ("SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR")
"""The directories of DeepGEMM's compiled kernels. SGLang sets the second to the first in its processes;
trainer and engines share one so that each finds kernels that the other compiled."""

COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "~/.cache/onpolicy/torchinductor")
"""The directory of code that PyTorch compiles. Its default is in the temporary directory, under a
predictable name from which it would load code; an import of PyTorch would also leave it there, empty."""

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""The parameters of glibc's mallopt (malloc.h)."""

KEPT_BUFFERS = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1))
"""The malloc settings that keep freed blocks of all sizes, for all threads. By default malloc returns a
large block to the system, and the next one costs a page fault and zeros for every 4 KiB."""

HAS_GLIBC = "CS_GNU_LIBC_VERSION" in os.confstr_names and bool(os.confstr("CS_GNU_LIBC_VERSION"))


def prepare_process() -> None:
    """Set these variables unless the environment sets them; children inherit them. Exempt this host
    from proxies, for all libraries. Call it first in a process: OpenMP reads its variable when
    torch is imported, MKL before its first product."""
    let_torchvision_import()
    for name, value in (STRICT_SUMS, PATIENT_THREADS, NCCL_MEMORY, OWN_FUNCTIONS):
        os.environ.setdefault(name, value)
    given = [os.environ[name] for name in KERNEL_CACHES if os.environ.get(name)]
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, [*given, os.path.expanduser("~/.cache/sglang/deep_gemm")][0])
    name, place = COMPILED
    with suppress(OSError):  # a user without a home to write to
        os.makedirs(os.path.expanduser(place), mode=0o700, exist_ok=True)
        os.environ.setdefault(name, os.path.expanduser(place))
    os.environ.update(proxy_exceptions(os.environ))
    if HAS_GLIBC:  # other C libraries' defaults only cost time
        for parameter, setting in KEPT_BUFFERS:
            ctypes.CDLL(None).mallopt(parameter, setting)


def collect_rarely() -> None:
    """Collect garbage every 50,000 new objects instead of 700: a fifth of the import time of
    SGLang, or of PyTorch and transformers, goes into futile collections. At its end the process
    does not look for any, which would take two seconds."""
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def use_variables_of(operators: str) -> None:
    """Set the VARIABLES of these operators; children inherit them. Call it before torch is imported.
    Raises ConfigError if the environment sets others, or if it is too late. (STRICT_SUMS, the default
    of `prepare_process`, may be replaced.)"""
    torch = sys.modules.get("torch")
    for name, value in VARIABLES.get(operators, {}).items():
        asked = os.environ.get(name, value)
        if asked != value and (name, asked) != STRICT_SUMS:
            raise ConfigError(
                f"{name}={asked}: --operators {operators} computes under {name}={value}. Unset the "
                "variable, or leave --operators out."
            )
        if name not in os.environ and torch is not None and torch.cuda.is_initialized():
            raise ConfigError(
                f"{name} is not set: --operators {operators} computes under {name}={value}, which "
                "PyTorch reads once, and it has begun to use a GPU in this process. Export the variable."
            )
        os.environ[name] = value


WORTH_GIVING_BACK = 256 << 20
"""The least bytes to return; zeroing pages again would take a seventh of a small model's step."""


class _Malloc(ctypes.Structure):
    """The result of glibc's mallinfo2 (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def give_back_buffers() -> None:
    """Return unused memory of KEPT_BUFFERS to the system, if there is enough of it. A gap between
    two used blocks fits no larger block, so without this the memory of a large model's first steps
    would grow."""
    if not HAS_GLIBC:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):  # glibc 2.33
        library.mallinfo2.restype = _Malloc
        if library.mallinfo2().fordblks < WORTH_GIVING_BACK:
            return
    library.malloc_trim(0)


def strict_sums_remedy() -> str:
    """Return the remedy for MKL's mode if sums depend on the number of rows; "" if it is strict."""
    name, strict = STRICT_SUMS
    asked = os.environ.get(name)
    if asked is None:
        return (
            f"{name} is not set: let the process begin with onpolicy.compat.process.prepare_process(), "
            f"or export {name}={strict}."
        )
    return "" if asked == strict else f"{name}={asked}: unset it (onpolicy asks for {strict})."
