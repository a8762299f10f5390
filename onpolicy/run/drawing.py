"""The sources of a run's rollouts: a fixed schedule, the order of completion, or a recorded order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

from onpolicy.errors import ConfigError, ParityError
from onpolicy.outputs.rollout_journal import Record, RolloutJournal, record_of
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.open_groups import FreeGroups, OpenGroup
from onpolicy.rollout.rounds import FreeJob, ReplayedRound
from onpolicy.run.ahead import Drawing, Rollouts, Schedule
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.replay_checks import require_steps
from onpolicy.run.sampler import Rollout, Sampler
from onpolicy.types import BranchKey

PATIENCE = 300.0
"""The seconds, besides --episode-time-limit, that a replay waits for functions that request nothing."""


class Replayed(Drawing):
    """A replay of a journal's rollouts, each span under its weight version.

    After each push it samples what the recorded run sampled under that version: as many tokens of each
    branch as the journal says, continued from earlier versions. The episodes' functions are called anew,
    with the observations written beside the journal. Every rollout is compared with its record. Spans
    for rollouts beyond --num-rollout are sampled, too, so that a checkpoint at the end holds the same
    open episodes as the recorded run.
    """

    def __init__(
        self, journal: RolloutJournal, sampler: Sampler, engines: EnginePair, first_step: int
    ):
        super().__init__(engines)
        self._journal, self._sampler, self._open = journal, sampler, sampler.open
        require_steps(journal, first_step, sampler.config.rollout.num_rollout)
        self._spans, self._first_step = journal.spans(), first_step

    def take(self, step: int) -> Rollout:
        record = self._journal.steps[step]
        self._require_weights(step, record)
        self._begin_groups()
        for group in self._open.groups:
            for episode in group.episodes:
                episode.fail_as_before()
        started = time.perf_counter()
        with self._measured():
            tokens = self._draw(step)
        seconds = time.perf_counter() - started
        numbers = [group["number"] for group in record["groups"]]
        groups = {group.number: group for group in self._open.groups}
        self._open.groups = [group for group in self._open.groups if group.number not in numbers]
        rollout = self._sampler.finish([groups[number] for number in numbers], tokens, seconds)
        self._require_same(record, record_of(step, self._engines.weight_digest, rollout.groups))
        return rollout

    def _begin_groups(self) -> None:
        """Open all groups that the recorded run had opened."""
        end = 1 + max(number for number, _ in self._spans)
        for number in range(self._open.next_number, end):
            self._open.groups.append(self._sampler.open_group(number))
            self._open.next_number = number + 1

    def _draw(self, version: int) -> int:
        """Sample the spans of a version; return their number of tokens."""
        drawn = dict(self._drawn_under(version))
        self._sampler.on_requests(len(drawn))
        limit = self._sampler.config.agent.episode_time_limit or 0.0
        job = ReplayedRound(drawn, version, PATIENCE + limit)
        self._engines.work(job)
        return job.num_tokens

    def _drawn_under(
        self, version: int
    ) -> Iterator[tuple[OpenEpisode, dict[BranchKey, int] | None]]:
        """Yield the episodes that go on under a version, with the tokens for each branch; None with the
        last version, in which the episode ends by itself."""
        for group in self._open.groups:
            for i, episode in enumerate(group.episodes):
                spans = self._spans.get((group.number, i), {})
                tokens = {
                    key: count
                    for key, of_branch in spans.items()
                    for drawn_under, count in of_branch
                    if drawn_under == version
                }
                last = max((of_branch[-1][0] for of_branch in spans.values()), default=None)
                if tokens and not episode.is_complete:
                    yield episode, None if version == last else tokens

    def _require_weights(self, step: int, record: Record) -> None:
        if record["weights"] == self._engines.weight_digest:
            return
        if step == self._first_step:
            raise ConfigError(
                f"--replay={self._journal.file}: the run that wrote it took rollout {step} from weights "
                f"with the digest {record['weights']}, and here they are "
                f"{self._engines.weight_digest}: another model, or another checkpoint of it. Give the "
                f"same --hf-checkpoint, or --load."
            )
        raise ParityError(
            f"--replay={self._journal.file}: the weights after rollout {step - 1} are others than in "
            "the run that wrote it, from the same samples. Replay it with the same versions of "
            "libraries, on the same kind of processor."
        )

    def _require_same(self, recorded: Record, now: Record) -> None:
        for group, again in zip(recorded["groups"], now["groups"], strict=True):
            self._require_as_many(recorded["step"], group, again)
            for i, (was, found) in enumerate(zip(group["samples"], again["samples"], strict=True)):
                if was != found:
                    raise ParityError(
                        f"--replay={self._journal.file}: rollout {recorded['step']}, group "
                        f"{group['number']}, response {i}: spans={found['spans']} of tokens "
                        f"{found['tokens']}, and the journal says {was['spans']} of {was['tokens']}. "
                        "The journal was changed, or the engines' operators have other bits here than "
                        "where it was written."
                    )

    def _require_as_many(self, step: int, recorded: Record, now: Record) -> None:
        """Raise OtherTokensError if functions returned more or fewer trajectories than recorded."""
        counts = len(now["samples"]), len(recorded["samples"])
        if counts[0] != counts[1]:
            prompt = self._sampler.inputs.prompts.at(recorded["number"]).index
            raise OtherTokensError(
                f"--replay={self._journal.file}: rollout {step}, prompt {prompt}: its episodes returned "
                f"{counts[0]} trajectories, and the journal has {counts[1]}: a function returns "
                "something else than in the run."
            )


class FreeRollouts(Drawing):
    """Asynchronous rollouts: engines always sample, a push interrupts them, and a step takes the first
    groups to complete.

    `open_groups` decides which groups may be taken. The order of completion is written to the run's
    journal of rollouts, from which `Replayed` repeats the run.
    """

    def __init__(self, sampler: Sampler, open_groups: FreeGroups, engines: EnginePair):
        super().__init__(engines)
        self._sampler, self._open, self._lock = sampler, open_groups, threading.Lock()
        self._job = FreeJob(0, self._on_end)
        self._num_drawn = self._num_counted = 0
        self._waited = self._drew_before = 0.0

    def take(self, step: int) -> Rollout:
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
        return self._sampler.finish(
            groups, self._drawn_since_last(), self._drew_before + self._waited
        )

    def _drawn_since_last(self) -> int:
        """Return the number of tokens sampled since the last rollout was taken."""
        before, self._num_counted = self._num_counted, self._num_drawn + self._job.num_tokens
        return self._num_counted - before

    def _batch(self) -> list[OpenGroup] | None:
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
        """Start the next episodes after one is complete (called in the episodes' thread).

        They go to the present job, even if an interrupted earlier job reports the end.
        """
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
