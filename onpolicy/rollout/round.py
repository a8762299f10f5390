"""Episodes that go on together, each by a limited number of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.rollout.base import SamplingJob
from onpolicy.rollout.episodes import OpenEpisode
from onpolicy.rollout.sampling import require_version
from onpolicy.trajectory import Completion


class Round(SamplingJob):
    """What `episodes` ask for under the weights of `version`, turn after turn.

    `most`: the tokens that each may sample, one number for all or one each; None: all that it asks for.
    `by_token`: the engine has to say of every token which weights it comes from. Raises EngineError
    where an answer comes from others.
    """

    def __init__(
        self,
        episodes: Sequence[OpenEpisode],
        most: Sequence[int | None] | int | None,
        version: int,
        *,
        by_token: bool = False,
    ):
        left = list(most) if isinstance(most, Sequence) else [most] * len(episodes)
        self._open = list(zip(episodes, left, strict=True))
        super().__init__([episode.request(tokens) for episode, tokens in self._open])
        self._version, self._by_token = version, by_token
        self.num_tokens = 0
        """Tokens sampled so far."""

    def add(self, number: int, completion: Completion) -> Sequence[int]:
        require_version(completion, self._version, by_token=self._by_token)
        super().add(number, completion)
        count = len(completion.response_ids)
        self.num_tokens += count
        episode, most = self._open[number]
        episode.add(completion)
        left = None if most is None else most - count
        if episode.is_complete or left == 0:
            return ()
        self._open.append((episode, left))
        self.requests.append(episode.request(left))
        return (len(self.requests) - 1,)
