"""Which GPUs a process of this host sees, and what they have free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, at the number that processes of its host know it by."""

    name: str

    capability: tuple[int, int]
    """Compute capability. Example: (9, 0)"""

    free: int
    """Bytes that new processes may take."""

    size: int
    """Bytes that it has."""


def num_gpus() -> int:
    """How many PyTorch sees; begins no CUDA context."""
    import torch

    return torch.cuda.device_count()


def gpus() -> tuple[Gpu, ...]:
    """Those that PyTorch sees, by number; none without CUDA. Begins a CUDA context on each."""
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
