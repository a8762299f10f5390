"""Rollouts by a fixed schedule: of a step itself, and, while the trainer works, of later steps.

A thread drives the engines while the loop's thread is in the trainer. The thread never calls the
trainer: after engines were restarted, it asks the loop for the weights of its version and continues once
they are pushed. The loop serves such requests whenever it waits for the thread: before it pushes the
next version, and in `take`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Literal

from onpolicy.errors import EngineError
from onpolicy.rollout.base import SamplingJob
from onpolicy.run.engines import EnginePair
from onpolicy.run.sampler import Rollout, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of rollouts and weights: a fixed rule, so that results do not depend on timing.

    Version v of the weights is pushed after v rollouts have been trained on. With a lag of K, step k is
    sampled under version max(0, k - K), and all samples of a version are complete before the next one is
    pushed:

            lag 0    push 0 | draw 0 | train 0 | push 1 | draw 1 | train 1 | push 2 ...

            lag 1    push 0 | draw 0 | train 0 | push 1 | train 1 | push 2 | train 2 | push 3 ...
                                     | draw 1  |        | draw 2  |        | draw 3  |

    The run goes from rollout `first` to `last` (exclusive).
    """

    lag: int
    first: int
    last: int

    def version_of(self, step: int) -> int:
        """Return the weight version that a step's rollout is sampled under."""
        return max(self.first, step - self.lag)

    def drawn_under(self, version: int) -> range:
        """Return the steps whose rollouts are sampled under a version, in order."""
        begins = version if version == self.first else version + self.lag
        return range(begins, min(version + self.lag + 1, self.last))


logger = logging.getLogger(__name__)

RollOut = Callable[[int, int, Work], Rollout]
"""A function (step, version, what samples) -> the step's rollout, called in the order of the steps."""


class Drawing(ABC):
    """A thread that samples rollouts, and the requests that its owner serves meanwhile."""

    def __init__(self, engines: EnginePair):
        self._engines = engines
        self.drawn: dict[int, Rollout] = {}
        """The finished rollouts that are not taken yet, by step."""

        self._thread: threading.Thread | None = None
        self._messages: SimpleQueue[Future[None] | Literal["news", "ended"]] = SimpleQueue()
        self._error: BaseException | None = None
        self._seconds = 0.0

    @abstractmethod
    def take(self, step: int) -> Rollout:
        """Return the rollout of a step."""

    def draw_ahead(self, step: int) -> None:
        """Start sampling for later steps under the weights of `step`, if the schedule has any."""

    def settle(self) -> float:
        """Wait until sampling is idle; return the seconds spent on it since the last call.

        Raises what the sampling thread raised.
        """
        self.drain()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def drain(self) -> None:
        """Wait until sampling is idle. Raises what the sampling thread raised."""
        while self._thread is not None:
            self._hear()

    def _hear(self) -> None:
        """Wait for a message of the thread; push the weights again if it asks for that."""
        message = self._messages.get()
        if message == "ended":
            self._end()
            if self._error is not None:
                raise self._error
        elif isinstance(message, Future):
            try:
                self._engines.push_again()
            except BaseException as error:
                message.set_exception(error)
                while self._messages.get() != "ended":
                    pass
                self._end()
                raise
            message.set_result(None)

    def close(self) -> None:
        """Stop the sampling in progress, and the engines with it."""
        if self._thread is None:
            return
        self._engines.rollout.stop()
        while (message := self._messages.get()) != "ended":
            if isinstance(message, Future):
                message.set_exception(EngineError("the run has ended"))
        self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None

    def _begin(self, draw: Callable[[], object]) -> None:
        """Run `draw` in the thread."""

        def run() -> None:
            try:
                with self._measured():
                    draw()
            except BaseException as error:
                logger.debug("drawing beside the trainer failed", exc_info=True)
                self._error = error
            finally:
                self._messages.put("ended")

        self._messages = SimpleQueue()
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def _push_again(self) -> None:
        """Ask the loop's thread (from the sampling thread) to push the weights again; wait for it."""
        done: Future[None] = Future()
        self._messages.put(done)
        done.result()


class Rollouts(Drawing):
    """A schedule's rollouts: each is sampled once, under its version."""

    def __init__(self, schedule: Schedule, roll_out: RollOut, engines: EnginePair):
        super().__init__(engines)
        self.schedule, self._roll_out = schedule, roll_out

    def take(self, step: int) -> Rollout:
        if step not in self.drawn:
            with self._measured():
                self._draw(step, self._engines.work)
        return self.drawn.pop(step)

    def draw_ahead(self, step: int) -> None:
        under = self.schedule.drawn_under(step)
        if later := [s for s in under if s > step and s not in self.drawn]:
            self._begin(partial(self._draw_all, later))

    def _draw_all(self, steps: Sequence[int]) -> None:
        for step in steps:
            self._draw(step, self._work)

    def _draw(self, step: int, work: Work) -> None:
        self.drawn[step] = self._roll_out(step, self.schedule.version_of(step), work)

    def _work(self, job: SamplingJob) -> None:
        self._engines.work(job, self._push_again)
