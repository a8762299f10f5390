"""The meeting point of processes that form a group: torch's store, on one address of this host."""

from datetime import timedelta

import torch.distributed as dist

from onpolicy.system.network import listen


def open_store(address: str, timeout: timedelta) -> tuple[dist.TCPStore, int]:
    """Return a store and its port. It listens on that address only, where torch would use all."""
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port
