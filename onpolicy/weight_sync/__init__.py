"""How trained weights reach the engines: one file per way; the push itself in `base.py`."""

from __future__ import annotations

from pathlib import Path

from onpolicy.weight_sync.base import Transport, push_weights

__all__ = ["Transport", "make_transport", "push_weights"]


def make_transport(way: str, directory: Path) -> Transport:
    """The transport that `--weight-sync` names; `directory` is for files of its own."""
    if way == "tensor":
        from onpolicy.weight_sync.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport()
    if way == "distributed":
        from onpolicy.weight_sync.distributed import DistributedTransport

        return DistributedTransport()
    from onpolicy.weight_sync.disk import DiskTransport

    return DiskTransport(directory)
