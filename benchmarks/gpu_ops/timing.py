"""Timing on the GPU's own clock: bursts of calls in turns, medians, operands outside the cache.

Before each burst the GPU is kept waiting while the host queues all its calls, so that kernels are
timed and not Python. Every call of a burst takes the next set of operands, and the sets together
are larger than the L2 cache, or as large as `MAX_SETS` sets can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Call = Callable[[int], object]
"""One call of an operator with the operands of a set, chosen by its index."""

MAX_SETS = 64
BURST_SECONDS = 0.002
"""Target of kernel time in one burst."""
MAX_BURST = 100
"""The most calls in a burst; several hundred kernels fit the queue before the host has to wait."""
CYCLES_PER_SECOND = 2e9
"""An upper bound of the GPU's clock rate, so that it is not kept waiting too briefly."""
MIN_ROUNDS, MAX_ROUNDS = 5, 40


def num_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Return the number of operand sets after which none is still in the L2 cache: 1 to 64."""
    return max(1, min(MAX_SETS, -(-2 * l2_bytes // bytes_per_set)))


def alternate(calls: Mapping[str, Call], sets: int, seconds: float) -> dict[str, float]:
    """Return median seconds per call of every variant, measured in turns for about `seconds` in
    all."""
    bursts = {name: _Burst(call, sets) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for round_number in range(MAX_ROUNDS):
        if round_number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, burst in bursts.items():
            times[name].append(burst.seconds_per_call())
    return {name: median(values) for name, values in times.items()}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Burst:
    """A burst of calls that are queued together and timed together."""

    def __init__(self, call: Call, sets: int):
        self.call, self.sets, self.next_set = call, sets, 0
        self._run(3)  # compiles, and fills caches of plans and memory
        _synchronize()
        seconds = self._timed(3, wait=0.0)
        self.count = max(1, min(MAX_BURST, round(BURST_SECONDS / max(seconds, 1e-7))))
        started = time.perf_counter()
        self._run(self.count)
        self.wait = 1.5 * (time.perf_counter() - started)
        _synchronize()

    def seconds_per_call(self) -> float:
        return self._timed(self.count, self.wait)

    def _timed(self, count: int, wait: float) -> float:
        if not torch.cuda.is_available():  # a rehearsal
            started = time.perf_counter()
            self._run(count)
            return (time.perf_counter() - started) / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wait:
            torch.cuda._sleep(int(wait * CYCLES_PER_SECOND))
        start.record()
        self._run(count)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / count

    def _run(self, count: int) -> None:
        for _ in range(count):
            self.call(self.next_set)
            self.next_set = (self.next_set + 1) % self.sets
