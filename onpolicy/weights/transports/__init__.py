"""The transports of trained weights to the engines, one file each; `weights/push.py` has the push."""

from __future__ import annotations

from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.weights.push import Transport

__all__ = ["Transport", "make_transport", "shares_gpus"]


def shares_gpus(config: TrainConfig, device: str) -> bool:
    """Return whether --weight-sync auto may use CUDA IPC for engines near the trainer. `device` is
    the trainer's. Engines that the run starts see all GPUs of their host."""
    return device == "cuda" and not config.engine.rollout_server_url


def make_transport(way: str, directory: Path, *, on_gpus: bool = False) -> Transport:
    """Create the transport that `--weight-sync` names; `directory` is for its own files. on_gpus:
    whether auto uses CUDA IPC in the place of shared memory (`shares_gpus`)."""
    from onpolicy.weights.transports import broadcast, disk, shared_memory

    if way == "distributed":
        return broadcast.DistributedTransport()
    if way == "disk":
        return disk.DiskTransport(directory)
    opens_gpus = way == "ipc" or (way == "auto" and on_gpus)
    near = (shared_memory.CudaIpcTransport if opens_gpus else shared_memory.SharedMemoryTransport)()
    return near if way == "ipc" else broadcast.ByHostTransport(near)
