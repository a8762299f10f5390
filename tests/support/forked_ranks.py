"""Ranks of a process group, each forked from a process that has imported what they need.

A spawned rank imports PyTorch, transformers and the tests anew, which costs more than most tests do.
The one they are forked from, one for all files that a worker runs, does nothing but import.
"""

import multiprocessing

import torch.multiprocessing

from onpolicy.compat.process import collect_rarely

IMPORTED = (
    "tests.support.recorded_megatron", "tests.support.megatron_training", "tests.support.checked_once",
    "onpolicy.train.fsdp.fsdp_model", "onpolicy.train.megatron.megatron_model",
    "tests.support.all_is_imported",
)  # fmt: skip
"""What ranks call, or import when they make a trainer: each would import it for itself."""

collect_rarely()  # in ranks too, which import this first
multiprocessing.set_forkserver_preload(["tests.support.megatron_ranks", *IMPORTED])
CONTEXT = multiprocessing.get_context("forkserver")


def run_on_ranks(function, args, count):
    """Call `function(rank, *args)` in `count` processes; the first error is raised here."""
    torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")
