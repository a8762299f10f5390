"""Episode under way: its function, its branches, and the listener that samples for them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onpolicy.errors import ConfigError
from onpolicy.rollout.branches import order_of, require_possible, said_by
from onpolicy.rollout.deadline import Stopwatch, within
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.episodes import Episode, Rollouter
from onpolicy.rollout.failures import (
    RETRIES,
    EpisodeFailure,
    OtherTokensError,
    WrittenFailures,
    failed_this_time,
    stops,
)
from onpolicy.rollout.past import answer_as_before, require_past
from onpolicy.rollout.results import result_of
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.rollout.stop_strings import until_stop_string
from onpolicy.rollout.turns import Ask, BranchRecord, Listener, Turns
from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Request

logger = logging.getLogger(__name__)


class OpenEpisode:
    """An attempt at a prompt, complete or not. Its function runs in the episode loop.

    `number`: the group's; `index`: the episode's place in it. Either a branch asks (waits for the
    policy), or the function runs. A listener is notified when a branch asks and when the episode
    ends.
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
        self.past: Mapping[tuple[str, ...], BranchRecord] = {}
        self.failures: list[EpisodeFailure] = []
        """The failures of earlier attempts."""

        self.episode: Episode | None = None
        """The result, once the episode is complete; without trajectories if it has failed for good.
        """

        self.error: BaseException | None = None
        """The error that ends the run."""

        self._mismatch: OtherTokensError | None = None
        self._start_over()
        self._listener: Listener | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_begun = False
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether the rollouter is done with the episode."""
        return self.episode is not None or self.error is not None

    def go_on(self, listener: Listener) -> bool:
        """Begin or resume the episode; the listener hears of all that is asked from here on.

        Return False if the episode is complete.
        """
        self.sampled_before = self.record()[0].trajectory.num_sampled
        with self._lock:
            self._listener = listener
            begins, self._is_begun = not self._is_begun, True
            asking = [(branch, branch.ask) for branch in self.branches.values() if branch.ask]
        if self.is_complete:
            return False
        if begins:
            episode_loop().begin(self._run)
        failed = self._written.of(self.num_failures, self.sampled_before)
        for branch, ask in asking:
            if failed:
                ask.wake(failed.error)
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
                self.episode = result_of(found, self.branches.values())
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
        self._give_up(failure)

    def _give_up(self, failure: EpisodeFailure) -> None:
        """Begin the episode anew, or complete it without anything to learn."""
        self.failures.append(replace(failure, said=said_by(self.record())))
        with self._lock:
            for branch in self.branches.values():
                branch.ask = None
        if self.rules.on_failure == "retry" and self.num_failures <= RETRIES:
            self.past = {}
            self._start_over()
        elif self.error is None:
            self.episode = Episode(trajectories=[])

    def fail_as_before(self) -> None:
        """Skip to the first attempt that did not fail before: in this run, or in the one it
        repeats."""
        while not self.is_complete and (failed := self._written.of(self.num_failures)):
            self._give_up(failed)

    def _start_over(self) -> None:
        """Reset the branches, with another seed than the attempts before."""
        request = self._request
        if self.failures:
            seed = sampling_seed(request.sampling_seed, "again", self.num_failures)
            request = replace(request, sampling_seed=seed)
        self.turns = Turns(self, request, Trajectory.begin(request.prompt_ids), ())
        self.branches: Mapping[tuple[str, ...], Turns] = {(): self.turns}
        self._stopwatch = Stopwatch()
        self.sampled_before = 0
        """Tokens that the first branch had sampled when the present round began."""

    @property
    def num_failures(self) -> int:
        """The number of attempts that have failed."""
        return len(self.failures)

    @property
    def name(self) -> str:
        """The name in messages. Example: 'prompt 12, sample 3'"""
        return f"prompt {self.prompt.index}, sample {self.index}"

    def record(self) -> list[BranchRecord]:
        """Return the state of every branch at this moment; the first branch comes first."""
        with self._lock:
            found = dict(self.past)
            for key, branch in self.branches.items():
                so_far = branch.trajectory
                past = found.get(key)
                if past is None or len(past.trajectory.token_ids) <= len(so_far.token_ids):
                    found[key] = BranchRecord(
                        key=key, trajectory=so_far, answers=tuple(branch.answers)
                    )
        return [found[key] for key in sorted(found, key=order_of)]

    def resume(self, past: Sequence[BranchRecord], failures: Sequence[EpisodeFailure] = ()) -> None:
        """Resume from `past`: the function is called anew, and gets the same answers as before.

        An error ends the run if it inserts other tokens than before. Raises ValueError for a record
        that belongs to no episode with this prompt.
        """
        self.failures = [*failures]
        self.past = {each.key: each for each in past}
        require_possible(self.past, self._request.prompt_ids)
        self._start_over()

    def finish(self, episode: Episode) -> None:
        """Set the result of an episode that was complete in a checkpoint."""
        self.episode = episode

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories to learn from, once the episode is complete: every sampled token once."""
        found = None if self.episode is None else self.episode.trajectories
        return [each for each in found or () if isinstance(each, Trajectory)]

    def branch(self, request: Request, shared: Trajectory, key: tuple[str, ...]) -> Turns:
        """Return a new branch. Raises ValueError if there is one with that key."""
        if key in self.branches:
            raise ValueError(f"key={key[-1]!r}: this branch has a fork of that key. Give another.")
        made = Turns(self, request, shared, key)
        with self._lock:
            self.branches = {**self.branches, key: made}
        return made

    def asks(self, branch: Turns, ask: Ask) -> None:
        """Have the branch wait for the policy from here on."""
        with self._lock:
            if self.is_complete or self.branches.get(branch.key) is not branch:
                raise ValueError("the episode has ended: nothing is sampled any more")
            branch.ask = ask
            self._stopwatch.stop()
            if branch.past and (reason := answer_as_before(branch, ask, branch.past)):
                self._answered(branch, ask, reason)
                return
            listener = self._listener
        assert listener is not None
        listener.asked(branch)

    def withdraw(self, branch: Turns, ask: Ask) -> None:
        """Cancel a call whose answer nobody waits for: the branch is as it was before."""
        with self._lock:
            if branch.ask is ask:
                branch.ask, branch.trajectory = None, ask.before
                self._stopwatch.start()

    def request(self, branch: Turns, ask: Ask, most: int | None = None) -> Request:
        """Return the request for the next tokens of a call, at most `most` of them.

        The seed is the branch's, and the sampler draws by the absolute position of a token, so
        under the same weights the tokens do not depend on how many requests they are sampled in.
        """
        left = ask.params.max_new_tokens - (branch.trajectory.num_sampled - ask.before.num_sampled)
        params = replace(ask.params, max_new_tokens=left if most is None else min(left, most))
        so_far = branch.trajectory
        begun = len(so_far.token_ids) - so_far.start_within(params.grammar)
        return replace(branch.request, prompt_ids=so_far.token_ids, params=params, num_begun=begun)

    def add(self, branch: Turns, ask: Ask, answer: Completion) -> bool:
        """Append the tokens sampled for `request`; return whether the call is complete."""
        with self._lock:
            if branch.ask is not ask:
                return True  # withdrawn
            before = branch.trajectory.token_ids[len(ask.before.token_ids) :]
            answer = until_stop_string(before, answer, ask.params.stop, self.rules)
            params = ask.params
            branch.trajectory = branch.trajectory.plus(answer, params.temperature, params.grammar)
            sampled = branch.trajectory.num_sampled - ask.before.num_sampled
            has_stopped = answer.finish_reason == FinishReason.STOP
            if not has_stopped and sampled < ask.params.max_new_tokens:
                return False
            self._answered(branch, ask, answer.finish_reason)
            return True

    def _answered(self, branch: Turns, ask: Ask, reason: FinishReason) -> None:
        branch.ask = None
        if all(other.ask is None for other in self.branches.values()):
            self._stopwatch.start()
        branch.answers.append((len(branch.trajectory.token_ids), reason))
        ask.wake()
