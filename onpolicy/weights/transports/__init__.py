"""How trained weights reach the engines: one file per way; the push itself in `weights/push.py`."""

from __future__ import annotations

from pathlib import Path

from onpolicy.config import TrainConfig
from onpolicy.weights.push import Transport

__all__ = ["Transport", "make_transport", "shares_gpus"]


def shares_gpus(config: TrainConfig, device: str) -> bool:
    """Return whether --weight-sync auto lets engines near the trainer, which computes on `device`,
    open the memory of its GPUs: those that the run starts see all GPUs of their host."""
    return device == "cuda" and not config.engine.rollout_server_url


def make_transport(way: str, directory: Path, *, on_gpus: bool = False) -> Transport:
    """The transport that `--weight-sync` names; `directory` is for files of its own.

    `on_gpus`: whether auto is to take CUDA IPC in the place of shared memory (`shares_gpus`).
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
    """The transport to engines on the trainer's host."""
    if way == "ipc":
        from onpolicy.weights.transports.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport()
    from onpolicy.weights.transports.shared_memory import SharedMemoryTransport

    return SharedMemoryTransport()
