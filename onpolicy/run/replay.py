"""A run again, by its journal of rollouts: each span is drawn under its version, and no clock decides.

When a version was pushed, what it had drawn in the run is drawn: as many tokens of each response as the
journal says, continued from those of earlier versions. Every rollout is compared with its record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from onpolicy.errors import ConfigError, ParityError
from onpolicy.outputs.rollout_journal import Record, RolloutJournal, record_of
from onpolicy.rollout.episodes import OpenEpisode
from onpolicy.rollout.round import Round
from onpolicy.run.ahead import Drawing
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.replay_checks import require_steps
from onpolicy.run.sampler import Rollout, Sampler


class Replayed(Drawing):
    """Draws what a journal says, and nothing else.

    It draws for rollouts beyond --num-rollout too, so that a checkpoint at its end holds what the run
    had drawn for them.
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
        """All that the run had begun."""
        end = 1 + max(number for number, _ in self._spans)
        for number in range(self._open.next_number, end):
            self._open.groups.append(self._sampler.open_group(number))
            self._open.next_number = number + 1

    def _draw(self, version: int) -> int:
        """How many tokens were."""
        drawn = list(self._drawn_under(version))
        self._sampler.on_requests(len(drawn))
        most = [tokens for _, tokens in drawn]
        job = Round([episode for episode, _ in drawn], most, version, by_token=True)
        self._engines.work(job)
        return job.num_tokens

    def _drawn_under(self, version: int) -> Iterator[tuple[OpenEpisode, int | None]]:
        """What was, and by how many tokens it went on: with its last span it ends by itself."""
        for group in self._open.groups:
            for i, episode in enumerate(group.episodes):
                spans = self._spans.get((group.number, i), [])
                if (tokens := dict(spans).get(version)) is not None and not episode.is_complete:
                    yield episode, None if version == spans[-1][0] else tokens

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
            for i, (was, found) in enumerate(zip(group["samples"], again["samples"], strict=True)):
                if was != found:
                    raise ParityError(
                        f"--replay={self._journal.file}: rollout {recorded['step']}, group "
                        f"{group['number']}, response {i}: spans={found['spans']} of tokens "
                        f"{found['tokens']}, and the journal says {was['spans']} of {was['tokens']}. "
                        "The journal was changed, or the engines' operators have other bits here than "
                        "where it was written."
                    )
