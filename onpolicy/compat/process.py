"""What a process that computes asks of its libraries, most of which read a variable once."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from onpolicy.contract import PORTABLE_KERNELS
from onpolicy.errors import ConfigError
from onpolicy.system.network import proxy_exceptions

STRICT_SUMS = ("MKL_CBWR", "AUTO,STRICT")
"""Without its strict mode MKL sums in another order for few rows on Intel CPUs (from AVX2 on)."""

PATIENT_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
"""Threads that wait by spinning take the cores from the engines: 7 times slower on a busy machine."""


NCCL_MEMORY = ("NCCL_CUMEM_ENABLE", "0")
"""What SGLang sets in its processes, and a group of NCCL's wants alike in all of its members; read when
the group is made (sglang/srt/entrypoints/engine.py, _set_envs_and_config)."""

OWN_FUNCTIONS = ("USE_HUB_KERNELS", "NO")
"""With the package `kernels`, which SGLang requires, transformers wraps functions that a kernel of the
Hub may replace; both engines run transformers' own. Read when transformers is imported."""

KERNEL_CACHES = ("SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR")
"""Where DeepGEMM keeps the kernels that it compiled. SGLang gives its processes the first one's value
for the second; the trainer is to find what an engine compiled, and an engine what the trainer did."""

COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "~/.cache/onpolicy/torchinductor")
"""Where PyTorch keeps what it compiles. It would be in the temporary directory, under a name that
others can foresee, whose code it would load; and importing PyTorch would leave it there, empty."""

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt (malloc.h)."""

KEPT_BUFFERS = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1))
"""As it comes, malloc maps a large block and gives it back to the system when it is freed, so the next
one costs a page fault, and zeros, for every 4 KiB. So blocks of all sizes are kept, for all threads."""

HAS_GLIBC = "CS_GNU_LIBC_VERSION" in os.confstr_names and bool(os.confstr("CS_GNU_LIBC_VERSION"))


def prepare_process() -> None:
    """Ask for these where the environment asks for nothing else; children inherit it. No request to
    this host takes a proxy, of whatever library.

    To be called first where a process starts: OpenMP reads its variable when torch is imported, MKL
    before its first product.
    """
    for name, value in (STRICT_SUMS, PATIENT_THREADS, NCCL_MEMORY, OWN_FUNCTIONS):
        os.environ.setdefault(name, value)
    given = [os.environ[name] for name in KERNEL_CACHES if os.environ.get(name)]
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, [*given, os.path.expanduser("~/.cache/sglang/deep_gemm")][0])
    _compile_at_home()
    os.environ.update(proxy_exceptions(os.environ))
    _keep_buffers()


def use_portable_kernels() -> None:
    """Ask for PORTABLE_KERNELS; children inherit it. To be called before torch is imported.

    Raises ConfigError if the environment asks for others. (STRICT_SUMS, which `prepare_process` asks for
    where nobody else does, gives way.)
    """
    for name, value in PORTABLE_KERNELS.items():
        asked = os.environ.get(name, value)
        if asked != value and (name, asked) != STRICT_SUMS:
            raise ConfigError(
                f"{name}={asked}: --operators portable computes under {name}={value}, on kernels of all "
                "x86-64 processors with AVX2. Unset the variable, or choose --operators cpu."
            )
    os.environ.update(PORTABLE_KERNELS)


def _compile_at_home() -> None:
    """Ask for COMPILED, where this user has a home to write to."""
    name, place = COMPILED
    with suppress(OSError):
        os.makedirs(os.path.expanduser(place), mode=0o700, exist_ok=True)
        os.environ.setdefault(name, os.path.expanduser(place))


def _keep_buffers() -> None:
    """Tell glibc's malloc; another C library keeps its own ways, which cost time and change no bit."""
    if HAS_GLIBC:
        for parameter, value in KEPT_BUFFERS:
            ctypes.CDLL(None).mallopt(parameter, value)


WORTH_GIVING_BACK = 256 << 20
"""Bytes. Pages that come back are zeros: of a small model they would take a seventh of each step."""


class _Malloc(ctypes.Structure):
    """What mallinfo2 tells of glibc's malloc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def give_back_buffers() -> None:
    """Give the system the memory of KEPT_BUFFERS that nothing lies in now, if it is worth it.

    Between two that are in use it fits no larger one, so without this the first steps of a large model
    each take some more.
    """
    if not HAS_GLIBC:
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallinfo2"):  # glibc 2.33
        library.mallinfo2.restype = _Malloc
        if library.mallinfo2().fordblks < WORTH_GIVING_BACK:
            return
    library.malloc_trim(0)


def strict_sums_remedy() -> str:
    """What to do about MKL's mode in a process whose sums depend on the number of rows."""
    name, strict = STRICT_SUMS
    asked = os.environ.get(name)
    if asked is None:
        return (
            f"{name} is not set: let the process begin with onpolicy.compat.process.prepare_process(), "
            f"or export {name}={strict}."
        )
    return "" if asked == strict else f"{name}={asked}: unset it (onpolicy asks for {strict})."
