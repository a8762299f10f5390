"""Jobs that grow while engines work: the requests of episodes, turn after turn, on all branches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping

from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.episode_loop import episode_loop
from onpolicy.rollout.failures import OtherTokensError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.sample_requests import require_version
from onpolicy.rollout.turns import Turns, UnderWay
from onpolicy.trajectory import Completion
from onpolicy.types import BranchKey, Request


class EpisodesJob(SamplingJob):
    """The requests of episodes under the weights of `version`, until each episode is complete.

    `by_token`: the engine must report the weight version of every token. Raises EngineError for an
    answer from other weights.
    """

    def __init__(self, version: int, *, by_token: bool = False, takes_parts: bool = False):
        super().__init__(takes_parts=takes_parts)
        self._version, self._by_token = version, by_token
        self._asked = list[tuple[Turns, Request]]()
        self._busy = set[UnderWay]()
        self._lock = threading.Lock()
        self.num_tokens = 0
        """Tokens sampled so far."""

    def begin(self, episodes: Iterable[OpenEpisode]) -> None:
        """Begin or resume these episodes."""
        episodes = [*episodes]
        with self._lock:
            self._busy.update(episodes)
        for episode in episodes:
            if not episode.go_on(self):
                self._leave(episode)

    def asked(self, branch: Turns) -> None:
        if not self.is_interrupted:
            self._ask(branch, None)

    def _ask(self, branch: Turns, most: int | None) -> None:
        with self._lock:
            if (ask := branch.ask) is not None:
                self._asked.append((branch, ask))
                self.requests.append(branch.episode.request(branch, ask, most))
        self.on_news()

    def add(self, number: int, completion: Completion) -> None:
        branch, ask = self._asked[number]
        is_answered = False
        if completion.response_ids:
            require_version(completion, self._version, by_token=self._by_token)
            self.num_tokens += len(completion.response_ids)
            is_answered = branch.episode.add(branch, ask, completion)
        super().add(number, completion)
        if not is_answered and not self.is_interrupted:
            self.cut(branch)

    def cut(self, branch: Turns) -> None:
        """Handle a branch that got only a part of its answer: request the rest."""
        self._ask(branch, None)

    def ended(self, episode: OpenEpisode) -> None:
        if episode.error is not None:
            self.error = episode.error
        self._leave(episode)

    def _leave(self, episode: UnderWay) -> None:
        with self._lock:
            self._busy.discard(episode)
        self.on_news()

    def stays_with(self, number: int) -> Hashable:
        return self._asked[number][0].episode

    @property
    def is_done(self) -> bool:
        return not self._busy and super().is_done


class FreeJob(EpisodesJob):
    """Free sampling until the job is interrupted; `on_end` starts others when an episode has ended."""

    def __init__(self, version: int, on_end: Callable[[OpenEpisode], None]):
        super().__init__(version, by_token=True, takes_parts=True)
        self._on_end = on_end

    def ended(self, episode: OpenEpisode) -> None:
        self._on_end(episode)
        super().ended(episode)


class ReplayJob(EpisodesJob):
    """A replay of a run's sampling under the weights of `version`.

    `drawn`: the token count of each branch by key; None: the episode came to its end under them.
    `patience`: seconds in which a function that was not waiting then has to ask for something.
    """

    def __init__(
        self,
        drawn: Mapping[OpenEpisode, Mapping[BranchKey, int] | None],
        version: int,
        patience: float,
    ):
        super().__init__(version, by_token=True)
        self._left: Mapping[UnderWay, dict[BranchKey, int] | None] = {
            episode: None if tokens is None else {**tokens} for episode, tokens in drawn.items()
        }
        self._patience = patience
        self.begin(drawn)
        episode_loop().begin(self._watch)

    async def _watch(self) -> None:
        """End the job when nobody asks for the tokens that are still to be sampled."""
        seen = -1
        while not self.is_done and self.error is None:
            num_asked = len(self.requests)
            # All requests are answered, and none came for `patience` seconds.
            if self.num_done == num_asked == seen:
                with self._lock:
                    episode = next(iter(self._busy), None)
                if episode is not None:
                    self.error = OtherTokensError(self._waits(episode))
                    self.on_news()
            seen = num_asked if self.num_done == num_asked else -1
            await asyncio.sleep(self._patience)

    def _waits(self, episode: UnderWay) -> str:
        asking = [key for key, branch in episode.branches.items() if branch.ask is not None]
        asks = "for branch " + ", ".join(map(_named, asking)) if asking else "for nothing"
        left = {key: count for key, count in (self._left[episode] or {}).items() if count}
        journal = "has it end"
        if left:
            key, count = next(iter(left.items()))
            journal = f"has {count} more tokens of branch {_named(key)}"
        return (
            f"--replay: {episode.name}: its function has asked {asks} for {self._patience:g} seconds, "
            f"and under version {self._version} the journal {journal}. What it asks for must depend on "
            "its arguments, on what is sampled and on what it observes alone."
        )

    def asked(self, branch: Turns) -> None:
        left = self._left[branch.episode]
        if left is None:
            self._ask(branch, None)
        elif most := left.get(branch.key, 0):
            self._ask(branch, most)

    def cut(self, branch: Turns) -> None:
        self.asked(branch)

    def add(self, number: int, completion: Completion) -> None:
        branch, _ = self._asked[number]
        left = self._left[branch.episode]
        if left is not None:
            left[branch.key] -= len(completion.response_ids)
        super().add(number, completion)
        if left is not None and not any(left.values()):
            self._leave(branch.episode)


def _named(key: BranchKey) -> str:
    return "/".join(key) or "''"
