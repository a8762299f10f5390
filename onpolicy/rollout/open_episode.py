"""Episode under way: its function, its branches, and the listener that samples for them.

Its time limit does not count the time spent waiting for the policy (`within`). An engine searches
one request's tokens only, so stop strings in answers that span several requests are found here
(`until_stop_string`). A resumed branch gets its earlier answers again, and checks make sure that it
repeats itself (`answer_as_before`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from onpolicy.errors import ConfigError
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.failures import (
    RETRIES,
    EpisodeFailure,
    EpisodeTimeoutError,
    OtherTokensError,
    WrittenFailures,
    failed_this_time,
    stops,
)
from onpolicy.rollout.results import order_of, said_by, samples_of
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.turns import EpisodeRules, Listener, Turns, UnderWay
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import BranchKey, Prompt, Request, Sample

logger = logging.getLogger(__name__)


class OpenEpisode:
    """An attempt at a prompt, complete or not. Its function runs in the episode loop.

    `number`: the group's; `index`: the episode's place in it. Either a branch asks (waits for the
    policy), or the function runs. A listener hears when a branch asks and when the episode ends.
    """

    def __init__(
        self,
        rollouter: Rollouter,
        prompt: Prompt,
        request: Request,
        rules: EpisodeRules | None = None,
        *,
        number: int = 0,
        index: int = 0,
    ):
        self.rules, self.prompt = rules or EpisodeRules(), prompt
        self.number, self.index = number, index
        self._rollouter, self._request = rollouter, request
        self._written = WrittenFailures(self.rules.observations, number, index)
        self.past: Mapping[BranchKey, Trajectory] = {}
        self.failures: list[EpisodeFailure] = []
        """The failures of earlier attempts."""

        self.samples: list[Sample] | None = None
        """The result, once it is complete; empty if it has failed for good."""

        self.error: BaseException | None = None
        """The error that ends the run."""

        self._ended_by: EpisodeFailure | None = None
        """The failure behind that error."""

        self._mismatch: OtherTokensError | None = None
        self._start_over()
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_begun = False
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the rollouter is done with the episode."""
        return self.samples is not None or self.error is not None

    def go_on(self, listener: Listener) -> bool:
        """Begin or resume the episode for a listener; return False if it is complete."""
        self.sampled_before = self.record()[0].num_sampled
        with self._lock:
            self._listener = listener
            begins, self._is_begun = not self._is_begun, True
            asking = [branch for branch in self.branches.values() if branch.ask]
        if self.is_complete:
            return False
        if begins:
            episode_loop().begin(self._run)
        failed = self._written.of(self.num_failures, self.sampled_before)
        for branch in asking:
            if failed:
                branch.wake(failed.error)
            else:
                listener.asked(branch)
        return True

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        while not self.is_complete:
            try:
                if failed := self._written.of(self.num_failures, self.sampled_before):
                    raise failed.error
                await self._rollouter.ready()  # not counted as the episode's time
                self._stopwatch = Stopwatch()
                work = self._rollouter.roll_out(self.prompt, self.turns)
                limit = None if self.rules.is_repeated else self.rules.time_limit
                found = Episode.of(await within(limit, self._stopwatch, work, self.name))
                # The episode's function may have caught the error.
                if failed := self._written.of(self.num_failures):
                    raise failed.error
                require_past(self)
                self.samples = samples_of(found, self.prompt, self.index, self.branches.values())
            except BaseException as error:  # SystemExit too
                if self._task is not None and self._task.cancelling():
                    raise
                self._fail(error)
        with self._lock:
            listener = self._listener
        assert listener is not None
        listener.ended(self)

    def end(self) -> None:
        """Cancel the function at the end of the run, and do not wait for it."""
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def differs(self, message: str) -> OtherTokensError:
        """Record and return an error that ends the run, even if the function catches it."""
        self._mismatch = OtherTokensError(message)
        return self._mismatch

    def _fail(self, error: BaseException) -> None:
        """Handle the failure of an attempt, which may end the run."""
        failed = self._written.of(self.num_failures)
        failure = failed or EpisodeFailure.of(error)
        if self._mismatch is not None:
            self.error = self._mismatch
        elif isinstance(error, ConfigError):
            self.error = error
        elif failed:
            logger.info("%s: as before, the episode %s", self.name, failure.message)
        elif self.rules.is_repeated:
            self.error = failed_this_time(self.name, failure)
            self.error.__cause__ = error
        elif self.rules.on_failure == "stop":
            self.error = stops(self.name, failure)
            self.error.__cause__ = error
        else:
            logger.warning("%s: the episode %s", self.name, failure.message)
            try:
                self._written.write(self.num_failures, failure, self.sampled_before)
            except OSError as full:
                self.error = full
        if self.error is None:
            self._give_up(failure)
        else:  # a checkpoint of this moment resumes this attempt, and counts no failure
            self._ended_by = replace(failure, said=said_by(self.record()))
            self._ask_nothing()

    def _ask_nothing(self) -> None:
        with self._lock:
            for branch in self.branches.values():
                branch.ask = None

    def _give_up(self, failure: EpisodeFailure) -> None:
        """Begin the episode anew, or complete it without anything to learn."""
        self.failures.append(replace(failure, said=said_by(self.record())))
        self._ask_nothing()
        if self.rules.on_failure == "retry" and self.num_failures <= RETRIES:
            self.past = {}
            self._start_over()
        else:
            self.samples = []

    def fail_as_before(self) -> None:
        """Skip the attempts that failed before: in this run, or in the one it repeats."""
        while not self.is_complete and (failed := self._written.of(self.num_failures)):
            self._give_up(failed)

    def _start_over(self) -> None:
        """Reset the branches, with another seed than the attempts before."""
        request = self._request
        if self.failures:
            seed = sampling_seed(request.sampling_seed, "again", self.num_failures)
            request = replace(request, sampling_seed=seed)
        beginning = Trajectory.begin(request.prompt_ids, request.images)
        self.turns = Turns(self, request, beginning, ())
        self.branches: Mapping[tuple[str, ...], Turns] = {(): self.turns}
        self._stopwatch = Stopwatch()
        past = (when for each in self.past.values() for *_, when in each.times)
        self._begun_at = time.monotonic() - max(past, default=0.0)
        self.sampled_before = 0
        """Tokens that the first branch had sampled when the present job began."""

    def _seconds(self) -> float:
        """Return the seconds since the attempt began, without those between a kill and its resume."""
        return round(time.monotonic() - self._begun_at, 3)

    @property
    def num_failures(self) -> int:
        """The number of attempts that have failed."""
        return len(self.failures)

    @property
    def all_failures(self) -> list[EpisodeFailure]:
        """The failures of all attempts, with the one that ends the run."""
        return [*self.failures, *filter(None, [self._ended_by])]

    @property
    def name(self) -> str:
        """The name in messages. Example: 'prompt 12, sample 3'"""
        return f"prompt {self.prompt.index}, sample {self.index}"

    def record(self) -> list[Trajectory]:
        """Return the tokens of every branch at this moment; the first branch comes first."""
        with self._lock:
            found = dict(self.past)
            for key, branch in self.branches.items():
                so_far = branch.trajectory
                past = found.get(key)
                if past is None or len(past.token_ids) <= len(so_far.token_ids):
                    found[key] = so_far
        return [found[key] for key in sorted(found, key=order_of)]

    def resume(self, past: Sequence[Trajectory], failures: Sequence[EpisodeFailure] = ()) -> None:
        """Resume from `past`: the function is called anew, and gets the same answers as before.

        Raises ValueError for a record that belongs to no episode with this prompt.
        """
        self.failures = [*failures]
        self.past = {each.key: each for each in past}
        first = self.past.get(())
        given = Trajectory.begin(self._request.prompt_ids, self._request.images)
        begun = first and first.until(len(given.token_ids))
        if begun is None or (begun.token_ids, begun.images) != (given.token_ids, given.images):
            raise ValueError("branches: none begins with the prompt")
        self._start_over()

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories to learn from, once the episode is complete: every sampled token once."""
        return [sample.trajectory for sample in self.samples or ()]

    def branch(self, request: Request, shared: Trajectory, key: tuple[str, ...]) -> Turns:
        """Return a new branch. Raises ValueError if there is one with that key."""
        if key in self.branches:
            raise ValueError(f"key={key[-1]!r}: this branch has a fork of that key. Give another.")
        made = Turns(self, request, shared, key)
        with self._lock:
            self.branches = {**self.branches, key: made}
        return made

    def asks(self, branch: Turns, ask: Request) -> None:
        """Have the branch wait for the policy from here on."""
        with self._lock:
            if self.is_complete or self.branches.get(branch.key) is not branch:
                raise ValueError("the episode has ended: nothing is sampled any more")
            branch.ask, branch.asked_at = ask, self._seconds()
            self._stopwatch.stop()
            if branch.past and answer_as_before(branch, ask, branch.past):
                self._answered(branch)
                return
            listener = self._listener
        assert listener is not None
        listener.asked(branch)

    async def wait_for(self, places: asyncio.Semaphore) -> None:
        """Acquire a place before any branch asks; the episode's time does not count it."""
        self._stopwatch.stop()
        try:
            await places.acquire()
        finally:
            self._stopwatch.start()

    def withdraw(self, branch: Turns, ask: Request) -> None:
        """Cancel a call whose answer nobody waits for: the branch is as it was before."""
        with self._lock:
            if branch.ask is ask:
                branch.ask, branch.trajectory = None, branch.before
                self._stopwatch.start()

    def request(self, branch: Turns, ask: Request, most: int | None = None) -> Request:
        """Return the request for the next tokens of a call, at most `most` of them.

        The seed is the branch's, and the sampler draws by the absolute position of a token, so
        under the same weights the tokens do not depend on how many requests they are sampled in.
        """
        so_far = branch.trajectory
        left = ask.params.max_new_tokens - (len(so_far.token_ids) - len(ask.prompt_ids))
        params = replace(ask.params, max_new_tokens=left if most is None else min(left, most))
        begun = so_far.num_begun(params.grammar)
        ask = replace(ask, prompt_ids=so_far.token_ids, images=so_far.images)
        return replace(ask, params=params, num_begun=begun)

    def add(self, branch: Turns, ask: Request, answer: Completion) -> bool:
        """Append the tokens sampled for `request`; return whether the call is complete."""
        with self._lock:
            if branch.ask is not ask:
                return True  # withdrawn
            params, begins = ask.params, len(ask.prompt_ids)
            before = branch.trajectory.token_ids[begins:]
            answer = until_stop_string(before, answer, params.stop, self.rules)
            so_far = branch.trajectory.plus(answer, params.temperature, params.grammar)
            branch.trajectory = so_far
            has_stopped = answer.finish_reason == FinishReason.STOP
            if not has_stopped and len(so_far.token_ids) - begins < params.max_new_tokens:
                return False
            branch.trajectory = so_far.answered((branch.asked_at, self._seconds()))
            self._answered(branch)
            return True

    def _answered(self, branch: Turns) -> None:
        branch.ask = None
        if all(other.ask is None for other in self.branches.values()):
            self._stopwatch.start()
        branch.wake()


T = TypeVar("T")

PATIENCE = 10.0
"""Seconds within which a cancelled function should have ended."""

_LEAST_PAUSE = 0.05
"""Least seconds between two checks of an episode whose time is nearly up."""


async def within(
    limit: float | None, watch: Stopwatch, work: Coroutine[Any, Any, T], name: str = ""
) -> T:
    """Return the result of `work`, cancelling it after `limit` seconds on the watch.

    Raises EpisodeTimeoutError then, whether or not the work heeds its cancellation.
    """
    if limit is None:
        return await work
    task = asyncio.create_task(work)
    try:
        while (left := limit - watch.seconds) > 0:
            done, _ = await asyncio.wait({task}, timeout=max(left, _LEAST_PAUSE))
            if done:
                return task.result()
        raise EpisodeTimeoutError(
            f"took more than --episode-time-limit={limit:g} seconds besides sampling"
        )
    finally:
        if task.cancel():
            asyncio.get_running_loop().call_later(PATIENCE, _say_if_it_stays, task, name)


def _say_if_it_stays(cancelled: asyncio.Task[Any], name: str) -> None:
    if not cancelled.done():
        logger.warning(
            "%s: a function goes on %g seconds after it was cancelled, and stays in this process. Have "
            "it end when CancelledError is raised in it.",
            name, PATIENCE,
        )  # fmt: skip


class Stopwatch:
    """A stopwatch that runs while an episode's function runs; started and stopped from any thread."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._before, self._since = self.seconds, None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        since = self._since
        return self._before + (0.0 if since is None else time.monotonic() - since)


def until_stop_string(
    before: Sequence[int], part: Completion, stop: Sequence[str], rules: EpisodeRules
) -> Completion:
    """Return a part of an answer, cut where a stop string ends that began in the tokens `before`.

    Follows SGLang's `Req.tail_str`, which searches the last tokens after every one.
    """
    if not (before and stop):
        return part
    nothing = Trajectory.begin(())
    longest = max(len(rules.tokens_of(text, nothing)[0]) for text in stop)
    whole = [*before, *part.response_ids]
    for end in range(len(before) + 1, len(whole) + 1):
        tail = rules.decode(whole[max(end - longest - 1, 0) : end])
        if any(text in tail for text in stop):
            return part.until(end - len(before), FinishReason.STOP)
    return part


def answer_as_before(branch: Turns, ask: Request, past: Trajectory) -> bool:
    """Answer a call with the tokens sampled before; return whether they are all of the answer.

    Raises OtherTokensError if the call comes after other tokens than before.
    """
    _require_same(branch, past, branch.trajectory)
    number, begins = len(branch.trajectory.answers), len(ask.prompt_ids)
    is_whole = number < len(past.answers)
    if is_whole:
        end, reason = past.answers[number]
        branch.trajectory = replace(past.until(end), finish_reason=reason)
    else:
        branch.past = None
        if begins < len(past.token_ids):
            branch.trajectory = past
    so_far = branch.trajectory
    within = so_far.grammar_at(begins)
    is_other = (within and within.grammar) != ask.params.grammar
    if not all(so_far.sampled[begins:]) or (is_other and len(so_far.token_ids) > begins):
        raise _differs(branch)
    return is_whole


def require_past(episode: UnderWay) -> None:
    """Raise OtherTokensError unless an ended episode has come at least as far as before."""
    for key, past in episode.past.items():
        if (branch := episode.branches.get(key)) is None:
            raise episode.differs(f"{episode.name}: the rollouter makes no branch {key}, as before")
        if branch.past is not None:
            _require_same(branch, past, branch.trajectory)
        if len(branch.trajectory.token_ids) < len(past.token_ids):
            raise _differs(branch)


def _require_same(branch: Turns, past: Trajectory, so_far: Trajectory) -> None:
    """Raise OtherTokensError unless one trajectory is the beginning of the other."""
    length = min(len(past.token_ids), len(so_far.token_ids))
    same = past.token_ids[:length] == so_far.token_ids[:length]
    same = same and past.sampled[:length] == so_far.sampled[:length]
    same = same and past.until(length).images == so_far.until(length).images
    if not (same and past.forks == so_far.forks):
        raise _differs(branch)


def _differs(branch: Turns) -> OtherTokensError:
    answers = branch.trajectory.answers
    after = answers[-1][0] if answers else 0
    return branch.episode.differs(
        f"{branch.episode.name}: the rollouter gives other tokens than before after token {after}. "
        "What it gives must depend on its arguments, on what is sampled and on what it observes alone."
    )
