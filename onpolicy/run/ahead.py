"""Rollouts as the schedule has them: a step's own, and beside training on it those of later steps.

A thread drives the engines while the loop's thread is in the trainer. It calls no trainer: where engines
were started again, it asks the loop for the weights of its version, and goes on when they hold them. The
loop hears it wherever it waits for the thread: before it pushes the next version, and in `take`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from onpolicy.errors import EngineError
from onpolicy.run.engines import EnginePair
from onpolicy.run.sampler import Generate, Rollout
from onpolicy.run.schedule import Schedule
from onpolicy.types import Completion, Request

logger = logging.getLogger(__name__)

RollOut = Callable[[int, int, Generate], Rollout]
"""(step, version, what samples) -> the step's rollout; to be called in the order of the steps."""


class Rollouts:
    """Draws each step's rollout once, under the version that the schedule says."""

    def __init__(self, schedule: Schedule, roll_out: RollOut, engines: EnginePair):
        self.schedule, self._roll_out, self._engines = schedule, roll_out, engines
        self.drawn: dict[int, Rollout] = {}
        """Those that are not taken yet, by their steps."""

        self._thread: threading.Thread | None = None
        self._asked: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._seconds = 0.0

    def take(self, step: int) -> Rollout:
        """The rollout of a step. What else is drawn under the weights that the engines hold is begun."""
        first, *later = [step, *(s for s in self.schedule.drawn_under(step) if s > step)]
        if first not in self.drawn:
            self._draw(first, self._engines.generate)
        if later := [s for s in later if s not in self.drawn]:
            self._thread = threading.Thread(target=self._draw_all, args=(later,), daemon=True)
            self._thread.start()
        return self.drawn.pop(first)

    def settle(self) -> float:
        """Wait until nothing is being drawn: the seconds that took drawing since the last time.

        Raises what drawing raised.
        """
        if self._thread is not None:
            self._serve()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _serve(self) -> None:
        """Push the thread's version again whenever it asks for that, until it ends."""
        while (asked := self._asked.get()) is not None:
            try:
                self._engines.push_again()
            except BaseException as error:
                asked.set_exception(error)
                self._end()
                raise
            asked.set_result(None)
        self._end()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End what is being drawn, and the engines with it."""
        if self._thread is None:
            return
        self._engines.rollout.stop()
        while (asked := self._asked.get()) is not None:
            asked.set_exception(EngineError("the run has ended"))
        self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        self._thread, self._asked = None, SimpleQueue()

    def _draw_all(self, steps: Sequence[int]) -> None:
        """In the thread."""
        try:
            for step in steps:
                self._draw(step, self._generate)
        except BaseException as error:
            logger.debug("drawing ahead failed", exc_info=True)
            self._error = error
        finally:
            self._asked.put(None)

    def _draw(self, step: int, generate: Generate) -> None:
        started = time.perf_counter()
        self.drawn[step] = self._roll_out(step, self.schedule.version_of(step), generate)
        self._seconds += time.perf_counter() - started

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self._engines.generate(requests, self._have_pushed_again)

    def _have_pushed_again(self) -> None:
        done: Future[None] = Future()
        self._asked.put(done)
        done.result()
