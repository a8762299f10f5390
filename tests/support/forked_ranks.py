"""Ranks of a process group, each forked from a process that has imported what they need.

A spawned rank imports PyTorch, transformers and the tests anew, which costs more than most tests do.
The one they are forked from, one for all files that a worker runs, does nothing but import.
"""

from __future__ import annotations

import multiprocessing

import torch.multiprocessing

multiprocessing.set_forkserver_preload(["tests.support.megatron_ranks"])
CONTEXT = multiprocessing.get_context("forkserver")


def run_on_ranks(function, args, count):
    """Call `function(rank, *args)` in `count` processes; the first error is raised here."""
    torch.multiprocessing.start_processes(function, args, count, start_method="forkserver")
