"""Rollouts as the schedule has them: a step's own, and beside training on it those of later steps.

A thread drives the engines while the loop's thread is in the trainer. It calls no trainer: where engines
were started again, it asks the loop for the weights of its version, and goes on when they hold them. The
loop answers while it waits for the thread: before it pushes the next version, and in `take`.
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
    """Which rollouts are drawn under which weights: a rule, so that no clock decides what is learnt.

    Version v of the weights is pushed when v rollouts have been trained on. With a lag of K the samples
    of step k are drawn under version max(0, k - K), all of them before the next version is pushed:

        lag 0    push 0 | draw 0 | train 0 | push 1 | draw 1 | train 1 | push 2 ...

        lag 1    push 0 | draw 0 | train 0 | push 1 | train 1 | push 2 | train 2 | push 3 ...
                                 | draw 1  |        | draw 2  |        | draw 3  |

    The run goes from rollout `first` to `last`.
    """

    lag: int
    first: int
    last: int

    def version_of(self, step: int) -> int:
        """The version that the rollout of a step is drawn under."""
        return max(self.first, step - self.lag)

    def drawn_under(self, version: int) -> range:
        """The steps whose rollouts are drawn under a version, in their order."""
        begins = version if version == self.first else version + self.lag
        return range(begins, min(version + self.lag + 1, self.last))


logger = logging.getLogger(__name__)

RollOut = Callable[[int, int, Work], Rollout]
"""(step, version, what samples) -> the step's rollout; to be called in the order of the steps."""


class Drawing(ABC):
    """A thread that draws, and what its owner does for it meanwhile."""

    def __init__(self, engines: EnginePair):
        self._engines = engines
        self.drawn: dict[int, Rollout] = {}
        """Rollouts that are not taken yet, by their steps."""

        self._thread: threading.Thread | None = None
        self._messages: SimpleQueue[Future[None] | Literal["news", "ended"]] = SimpleQueue()
        self._error: BaseException | None = None
        self._seconds = 0.0

    @abstractmethod
    def take(self, step: int) -> Rollout:
        """The rollout of a step."""

    def draw_ahead(self, step: int) -> None:
        """Begin to draw what the weights of `step` are to draw for later steps, if anything."""

    def settle(self) -> float:
        """Wait until nothing is being drawn: the seconds that took drawing since the last time.

        Raises what drawing raised.
        """
        self.drain()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def drain(self) -> None:
        """Wait until nothing is being drawn. Raises what drawing raised."""
        while self._thread is not None:
            self._hear()

    def _hear(self) -> None:
        """Wait for a message of the thread: push its version again if it asks for that."""
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
        """End what is being drawn, and the engines with it."""
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
        """Let the thread draw."""

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
        """In the thread: have it done."""
        done: Future[None] = Future()
        self._messages.put(done)
        done.result()


class Rollouts(Drawing):
    """Draws each step's rollout once, under the version that the schedule says."""

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
