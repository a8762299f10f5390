"""The transports of trained weights to the engines, one file each; `weights/push.py` has the push."""

from __future__ import annotations

from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.weights.push import Transport

__all__ = ["Transport", "make_transport", "shares_gpus"]


def shares_gpus(config: TrainConfig, device: str) -> bool:
    """Return whether --weight-sync auto may use CUDA IPC for engines near the trainer.

    `device` is the trainer's. Engines that the run starts see all GPUs of their host.
    """
    return device == "cuda" and not config.engine.rollout_server_url


def make_transport(way: str, directory: Path, *, on_gpus: bool = False) -> Transport:
    """Create the transport that `--weight-sync` names; `directory` is for its own files.

    `on_gpus`: whether auto uses CUDA IPC in the place of shared memory (`shares_gpus`).
    """
    if way in ("auto", "tensor"):
        from onpolicy.weights.transports.by_host import ByHostTransport

        return ByHostTransport(_make_near("ipc" if way == "auto" and on_gpus else "tensor"))
    if way == "ipc":
        return _make_near(way)
    if way == "distributed":
        from onpolicy.weights.transports.distributed import DistributedTransport

        return DistributedTransport()
    from onpolicy.weights.transports.disk import DiskTransport

    return DiskTransport(directory)


def _make_near(way: str) -> Transport:
    """Create the transport to engines on the trainer's host."""
    if way == "ipc":
        from onpolicy.weights.transports.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport()
    from onpolicy.weights.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()
