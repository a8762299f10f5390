"""What importing this saves a process with many gloo groups, as Megatron's: a thread for each.

Each group opens a device of its own, whose thread wakes a hundred times a second. Here the groups of a
process that listen at the same place share one. Ranks that a test starts anew have theirs.
"""

import functools
import os

from torch.distributed import ProcessGroupGloo

from onpolicy.system.network import GLOO_INTERFACE

_make_group = ProcessGroupGloo.__init__


@functools.cache
def _device(process, interface):
    return ProcessGroupGloo.create_default_device()


def _make_group_on_the_device(self, store, rank, size, timeout):
    options = ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_device(os.getpid(), os.environ.get(GLOO_INTERFACE))]
    _make_group(self, store, rank, size, options)


ProcessGroupGloo.__init__ = _make_group_on_the_device
