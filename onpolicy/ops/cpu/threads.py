"""Threads for the CPU operators: many single-threaded pieces, never one multi-threaded kernel.

A BLAS call on several threads partitions its work by their number, and the partition changes the
order of the sums. So the operators cut their work into pieces whose number of rows decides no bit,
run every piece on one thread, and distribute the pieces.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from onpolicy.errors import ContractError
from onpolicy.ops.base import Piece

MIN_PARALLEL_FLOPS = 1e8
"""Minimum work for threads, below which passing the interpreter lock around costs more than it
saves."""

_thread = threading.local()


class PiecePool:
    """A pool that runs independent pieces of an operator; results do not depend on `num_threads`."""

    def __init__(self, num_threads: int):
        # Kernels outside the operators (element-wise, reductions) run on one thread
        # too: a second one would move the borders between vectorised and scalar code.
        torch.set_num_threads(1)
        self.num_threads = num_threads
        self._executor = (
            ThreadPoolExecutor(num_threads - 1, "onpolicy-ops", _begin_thread)
            if num_threads > 1
            else None
        )

    def threads_for(self, flops: float) -> int:
        """Return how many threads share this much work, if it starts on this thread."""
        is_alone = flops < MIN_PARALLEL_FLOPS or hasattr(_thread, "runs_pieces")
        return 1 if is_alone else self.num_threads

    def run(self, pieces: Iterable[Piece], flops: float) -> None:
        """Run every piece; on this thread if it belongs to the pool, or if the work is small."""
        if torch.get_num_threads() != 1:
            raise ContractError(
                f"torch.get_num_threads()={torch.get_num_threads()}: the aligned CPU operators need "
                "1, since kernels that split work over threads sum in another order. Do not call "
                "torch.set_num_threads; choose the number of threads with --cpu-threads."
            )
        if self.threads_for(flops) == 1:
            for piece in pieces:
                piece()
            return
        assert self._executor is not None
        waiting, inference = deque(pieces), torch.is_inference_mode_enabled()
        helpers = min(self.num_threads, len(waiting)) - 1
        futures = [self._executor.submit(_run, waiting, inference) for _ in range(helpers)]
        _thread.runs_pieces = True
        try:
            _run(waiting, inference)  # this thread is one of them, and need not be woken
        finally:
            del _thread.runs_pieces
            waiting.clear()
            for future in futures:
                if not future.cancel():  # a helper that has not begun has nothing left to do
                    future.result()


def _begin_thread() -> None:
    torch.set_num_threads(1)
    _thread.runs_pieces = True


def _run(waiting: deque[Piece], inference: bool) -> None:
    """Run pieces until none is left, under the caller's thread-local autograd mode."""
    with torch.inference_mode(inference), torch.no_grad():
        while waiting:
            try:
                piece = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            piece()
