"""Ranks of a process group, each forked from a process that has imported what they need.

A spawned rank imports PyTorch, transformers and the tests anew, which costs more than most tests do.
The one they are forked from, one for all files that a worker runs, does nothing but import.
"""

import contextlib
import multiprocessing
import sys
from multiprocessing import forkserver

import torch.multiprocessing

from onpolicy.compat.process import collect_rarely

IMPORTED = (
    "tests.support.recorded_megatron", "tests.support.megatron_training", "tests.support.checked_once",
    "onpolicy.training.fsdp.fsdp_model", "onpolicy.training.megatron.megatron_model",
    "tests.support.one_gloo_device", "tests.support.all_is_imported",
)  # fmt: skip
"""What ranks call, or import when they make a trainer: each would import it for itself."""

collect_rarely()  # in ranks too, which import this first
CONTEXT = multiprocessing.get_context("forkserver")

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.support.megatron_ranks", *IMPORTED])


@contextlib.contextmanager
def ranks_are_forked():
    """Inside, a process that is started is one of ours. multiprocessing has one server for everything,
    which has imported what those need who came first, such as scoring workers."""
    theirs, forkserver.connect_to_new_process = (
        forkserver.connect_to_new_process, _server.connect_to_new_process,
    )  # fmt: skip
    try:
        yield
    finally:
        forkserver.connect_to_new_process = theirs


def run_on_ranks(function, args, count):
    """Call `function(rank, *args)` in `count` processes; the first error is raised here."""
    with ranks_are_forked():
        torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")


def require_imported():
    assert "tests.support.all_is_imported" in sys.modules, "a rank of another process's server"
