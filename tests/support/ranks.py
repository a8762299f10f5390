"""Ranks of a trainer as threads of this process, with torch.distributed's own collectives.

As in torch's own tests (torch/testing/_internal/distributed/multi_threaded_pg.py): a world per thread.
"""

import threading

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from onpolicy.training import distributed

HANGS_AFTER = 300.0
"""Seconds; a rank that leaves a collective operation out lets the others wait for ever."""


def on_ranks(count, function):
    """What `function(rank)` returns on each of so many ranks, or the exception that it raises."""
    outcomes = [None] * count
    store = dist.HashStore()

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            outcomes[rank] = function(rank)
        except Exception as error:
            outcomes[rank] = error
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(count)]
    of_this_process, distributed._data_group = distributed._data_group, None
    threaded._install_threaded_pg()
    _set_thread_isolation_mode(True)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_AFTER)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for another"
    finally:
        _set_thread_isolation_mode(False)
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        distributed._data_group = of_this_process
    return outcomes
