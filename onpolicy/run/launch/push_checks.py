"""The checks that weights can be pushed on this machine with the chosen --weight-sync."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import stored_shapes
from onpolicy.weights.transports import shares_gpus

SHARED_MEMORY = Path("/dev/shm")

MIB = 1 << 20


def require_transport(config: TrainConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if there is no GPU for CUDA IPC, or no room for a bucket in shared memory."""
    way = config.sync.weight_sync
    if way == "ipc" and contract.device != "cuda":
        raise ConfigError(
            "--weight-sync=ipc: engines open the memory of the trainer's GPUs, and this machine has "
            "none. Choose --weight-sync tensor."
        )
    is_shared = way == "tensor" or (way == "auto" and not shares_gpus(config, contract.device))
    if is_shared and SHARED_MEMORY.is_dir():
        _require_shared_memory(config, contract)


def _require_shared_memory(config: TrainConfig, contract: NumericsContract) -> None:
    largest, bucket = _largest_bucket(config, contract)
    disk = shutil.disk_usage(SHARED_MEMORY)
    if bucket <= disk.free:
        return
    lower = "" if largest > disk.free else ", lower --update-weight-buffer-size"
    sync = config.sync
    raise ConfigError(
        f"--weight-sync={sync.weight_sync}: a push puts up to {bucket / MIB:.0f} MiB of weights into "
        f"shared memory at a time (--update-weight-buffer-size={sync.update_weight_buffer_size}; the "
        f"largest weight has {largest / MIB:.0f}), and {SHARED_MEMORY} has {disk.free / MIB:.0f} MiB "
        f"free of {disk.total / MIB:.0f}. Start the container with more (docker run --shm-size=8g)"
        f"{lower}, or choose --weight-sync disk."
    )


def _largest_bucket(config: TrainConfig, contract: NumericsContract) -> tuple[int, int]:
    """Return the bytes of the largest weight, and of the largest bucket."""
    itemsize = getattr(torch, contract.dtype).itemsize
    stored = stored_shapes(Path(config.model.hf_checkpoint), "--hf-checkpoint").values()
    sizes = [tensor.numel() * itemsize for tensor in stored]
    buffer = config.sync.update_weight_buffer_size * MIB
    return max(sizes), max(min(sum(sizes), buffer), max(sizes))
