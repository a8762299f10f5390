"""The sources of a run's rollouts: a fixed schedule, the order of completion, or a recorded order.

A thread drives the engines while the loop's thread is in the trainer. The thread never calls the
trainer: after engines were restarted, it asks the loop for the weights of its version and continues once
they are pushed. The loop serves that while it waits for the thread: before a push, and in `take`.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Literal

from onpolicy.errors import ConfigError, EngineError, ParityError
from onpolicy.outputs.recorded_order import DrawnGroup, DrawnStep, RolloutJournal, record_of
from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.episode_jobs import FreeJob, ReplayJob
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import FreeGroups
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.input_checks import require_steps
from onpolicy.run.sampler import Drawn, Sampler, Work
from onpolicy.types import BranchKey

logger = logging.getLogger(__name__)

PATIENCE = 300.0
"""The seconds, besides --episode-time-limit, that a replay waits for functions that request nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of rollouts and weights: a fixed rule, so that results do not depend on timing.

    Version v of the weights is pushed after v rollouts have been trained on. With a lag of K, step k is
    sampled under version max(0, k - K), and all samples of a version are complete before the next one is
    pushed:

            lag 0    push 0 | draw 0 | train 0 | push 1 | draw 1 | train 1 | push 2 ...

            lag 1    push 0 | draw 0 | train 0 | push 1 | train 1 | push 2 | train 2 | push 3 ...
                                     | draw 1  |        | draw 2  |        | draw 3  |

    The run goes from rollout `first` to `last` (exclusive)."""

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


RollOut = Callable[[int, int, Work], Drawn]
"""A function (step, version, what samples) -> the step's rollout, called in the order of the steps."""


class Drawing(ABC):
    """A thread that samples rollouts, and the requests that its owner serves meanwhile."""

    def __init__(self, engines: EnginePair):
        self._engines = engines
        self.drawn: dict[int, Drawn] = {}
        """The finished rollouts that are not taken yet, by step."""

        self._thread: threading.Thread | None = None
        self._messages: SimpleQueue[Future[None] | Literal["news", "ended"]] = SimpleQueue()
        self._error: BaseException | None = None
        self._seconds = 0.0

    @abstractmethod
    def take(self, step: int) -> Drawn:
        """Return the rollout of a step."""

    def draw_ahead(self, step: int) -> None:
        """Start sampling for later steps under the weights of `step`, if the schedule has any."""

    def settle(self) -> float:
        """Wait until sampling is idle; return the seconds spent on it since the last call. Raises
        what the sampling thread raised."""
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

    def take(self, step: int) -> Drawn:
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


class Replayed(Drawing):
    """A replay of a journal's rollouts, each span under its weight version.

    After each push it samples what the recorded run sampled under that version: as many tokens of each
    branch as the journal says, continued from earlier versions. The episodes' functions are called anew,
    with the observations written beside the journal. Every rollout is compared with its record. Spans
    for rollouts beyond --num-rollout are sampled, too, so that a checkpoint at the end holds the same
    open episodes as the recorded run."""

    def __init__(
        self, journal: RolloutJournal, sampler: Sampler, engines: EnginePair, first_step: int
    ):
        super().__init__(engines)
        self._journal, self._sampler, self._open = journal, sampler, sampler.open
        require_steps(journal, first_step, sampler.config.rollout.num_rollout)
        self._spans, self._first_step = journal.spans(), first_step

    def take(self, step: int) -> Drawn:
        record = self._journal.steps[step]
        self._require_weights(step, record)
        self._open_groups()
        for episode in chain.from_iterable(self._open.groups.values()):
            episode.fail_as_before()
        started = time.perf_counter()
        with self._measured():
            tokens = self._draw(step)
        seconds = time.perf_counter() - started
        groups = [self._open.groups.pop(group.number) for group in record.groups]
        drawn = self._sampler.finish(groups, tokens, seconds)
        self._require_same(record, record_of(step, self._engines.weight_digest, drawn[0]))
        return drawn

    def _open_groups(self) -> None:
        """Open all groups that the recorded run had opened."""
        end = 1 + max(number for number, _ in self._spans)
        while self._open.next_number < end:
            self._open.open_next()

    def _draw(self, version: int) -> int:
        """Sample the spans of a version; return their number of tokens."""
        drawn = dict(self._drawn_under(version))
        self._sampler.on_requests(len(drawn))
        limit = self._sampler.config.agent.episode_time_limit or 0.0
        job = ReplayJob(drawn, version, PATIENCE + limit)
        self._engines.work(job)
        return job.num_tokens

    def _drawn_under(
        self, version: int
    ) -> Iterator[tuple[OpenEpisode, dict[BranchKey, int] | None]]:
        """Yield the episodes that go on under a version, with the tokens for each branch; None with the
        last version, in which the episode ends by itself."""
        for episode in chain.from_iterable(self._open.groups.values()):
            spans = self._spans.get((episode.number, episode.index), {})
            tokens = {
                key: count
                for key, of_branch in spans.items()
                for drawn_under, count in of_branch
                if drawn_under == version
            }
            last = max((of_branch[-1][0] for of_branch in spans.values()), default=None)
            if tokens and not episode.is_complete:
                yield episode, None if version == last else tokens

    def _require_weights(self, step: int, record: DrawnStep) -> None:
        if record.weights == self._engines.weight_digest:
            return
        if step == self._first_step:
            raise ConfigError(
                f"--replay={self._journal.file}: the run that wrote it took rollout {step} from weights "
                f"with the digest {record.weights}, and here they are "
                f"{self._engines.weight_digest}: another model, or another checkpoint of it. Give the "
                f"same --hf-checkpoint, or --load."
            )
        raise ParityError(
            f"--replay={self._journal.file}: the weights after rollout {step - 1} are others than in "
            "the run that wrote it, from the same samples. Replay it with the same versions of "
            "libraries, on the same kind of processor."
        )

    def _require_same(self, recorded: DrawnStep, now: DrawnStep) -> None:
        for group, again in zip(recorded.groups, now.groups, strict=True):
            self._require_as_many(recorded.step, group, again)
            for i, (was, found) in enumerate(zip(group.samples, again.samples, strict=True)):
                if was != found:
                    raise ParityError(
                        f"--replay={self._journal.file}: rollout {recorded.step}, group "
                        f"{group.number}, response {i}: spans={found.spans} of tokens "
                        f"{found.tokens}, and the journal says {was.spans} of {was.tokens}. "
                        "The journal was changed, or the engines' operators have other bits here than "
                        "where it was written."
                    )

    def _require_as_many(self, step: int, recorded: DrawnGroup, now: DrawnGroup) -> None:
        """Raise OtherTokensError if functions returned more or fewer trajectories than recorded."""
        counts = len(now.samples), len(recorded.samples)
        if counts[0] != counts[1]:
            prompt = self._sampler.inputs.prompts.at(recorded.number).index
            raise OtherTokensError(
                f"--replay={self._journal.file}: rollout {step}, prompt {prompt}: its episodes returned "
                f"{counts[0]} trajectories, and the journal has {counts[1]}: a function returns "
                "something else than in the run."
            )


class FreeRollouts(Drawing):
    """Asynchronous rollouts: engines always sample, a push interrupts them, and a step takes the
    first groups to complete. `open_groups` decides which groups may be taken. The order of completion
    is written to the run's journal of rollouts, from which `Replayed` repeats the run."""

    def __init__(self, sampler: Sampler, open_groups: FreeGroups, engines: EnginePair):
        super().__init__(engines)
        self._sampler, self._open, self._lock = sampler, open_groups, threading.Lock()
        self._job = FreeJob(0, self._on_end)
        self._num_drawn = self._num_counted = 0
        self._waited = self._drew_before = 0.0

    def take(self, step: int) -> Drawn:
        with self._lock:
            if self._job.error is not None:  # from an episode that ended between the jobs
                raise self._job.error
            self._num_drawn += self._job.num_tokens
            self._job = FreeJob(step, self._on_end)
            episodes = self._open.begin(step)
        self._sampler.on_requests(len(episodes))
        self._job.begin(episodes)
        self._begin(partial(self._engines.work, self._job, self._push_again))
        started = time.perf_counter()
        # Wait for a batch of complete groups; meanwhile serve pushes to restarted servers.
        while (groups := self._batch()) is None:
            self._hear()
        self._waited = time.perf_counter() - started
        before, self._num_counted = self._num_counted, self._num_drawn + self._job.num_tokens
        seconds = self._drew_before + self._waited
        return self._sampler.finish(groups, self._num_counted - before, seconds)

    def _batch(self) -> list[list[OpenEpisode]] | None:
        with self._lock:
            return self._open.batch()

    def settle(self) -> float:
        """Interrupt sampling; unfinished responses are continued under the next weights."""
        # A new episode belongs to the running job or to the next one, never to both.
        with self._lock:
            self._job.interrupt()
        seconds = super().settle()
        self._drew_before = max(seconds - self._waited, 0.0)
        return seconds

    def _on_end(self, episode: OpenEpisode) -> None:
        """Start the next episodes after one is complete (called in the episodes' thread). They go
        to the present job, even if an interrupted earlier job reports the end."""
        with self._lock:
            job, begun = self._job, self._open.end(episode)
            if episode.error is not None:
                job.error = episode.error
            if not job.is_interrupted:
                job.begin(begun)
        self._messages.put("news")


def make_drawing(sampler: Sampler, engines: EnginePair, first: int) -> Drawing:
    """Return the source of rollouts for a run that starts or resumes after `first` rollouts."""
    if sampler.inputs.replayed is not None:
        return Replayed(sampler.inputs.replayed, sampler, engines, first)
    if isinstance(sampler.open, FreeGroups):
        return FreeRollouts(sampler, sampler.open, engines)
    rollout = sampler.config.rollout
    schedule = Schedule(lag=rollout.rollout_lag, first=first, last=rollout.num_rollout)
    return Rollouts(schedule, sampler.roll_out, engines)
