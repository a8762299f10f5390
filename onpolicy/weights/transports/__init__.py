"""How trained weights reach the engines: one file per way; the push itself in `weights/push.py`."""

from __future__ import annotations

from pathlib import Path

from onpolicy.weights.push import Transport

__all__ = ["Transport", "make_transport"]


def make_transport(way: str, directory: Path) -> Transport:
    """The transport that `--weight-sync` names; `directory` is for files of its own."""
    if way == "tensor":
        from onpolicy.weights.transports.by_host import ByHostTransport

        return ByHostTransport()
    if way == "ipc":
        from onpolicy.weights.transports.cuda_ipc import CudaIpcTransport

        return CudaIpcTransport()
    if way == "distributed":
        from onpolicy.weights.transports.distributed import DistributedTransport

        return DistributedTransport()
    from onpolicy.weights.transports.disk import DiskTransport

    return DiskTransport(directory)
