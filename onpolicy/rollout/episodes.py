"""How a prompt is rolled out: an episode, in which a policy samples and is given more.

A rollouter says what happens in an episode, and waits wherever the policy has to go on. Schedules say
when that is, from which weights, and in how many stretches: the rollouter sees none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onpolicy.trajectory import Completion, FinishReason, Trajectory
from onpolicy.types import Prompt, Request, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What became of one attempt at a prompt."""

    trajectories: list[Trajectory]
    """To be rewarded and learnt from; one, where nothing was rewritten on the way."""

    reward: float | None = None
    """Of all; None: the run's reward function says it."""

    rewards: Sequence[float] | None = None
    """Of each trajectory."""

    token_rewards: Sequence[Sequence[float]] | None = None
    """Of each sampled token of each trajectory, [R]."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    """What is to be seen of it later: tool calls, why it ended."""


class Turns:
    """What an episode may do: have the policy go on, and give it tokens."""

    def __init__(self, request: Request):
        self.request = request
        """What the policy is asked for first; its longest response counts all sampled tokens."""

        self.trajectory = Trajectory.begin(request.prompt_ids, request.params.temperature)

    async def sample(self) -> Trajectory:
        """Have the policy go on, to a stop token or the longest response: the trajectory with that.

        Raises ValueError where it has stopped and was given nothing since.
        """
        if self.num_left:
            if self.trajectory.sampled[-1]:
                raise ValueError(
                    "the policy has stopped: give it tokens before it is to sample more"
                )
            await _Asked()
        return self.trajectory

    def give(self, token_ids: Sequence[int]) -> None:
        """Let the policy read tokens after those that there are; they are not learnt."""
        self.trajectory = self.trajectory.given(token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.params.max_new_tokens - self.trajectory.num_sampled


class Rollouter(ABC):
    """Rolls prompts out; one for all of a run, so what belongs to an episode stays in `roll_out`."""

    @abstractmethod
    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        """One attempt at a prompt. It may wait for `turns.sample()`, and for nothing else.

        It is called again for an episode that a checkpoint interrupts, so it must depend on its
        arguments and on what is sampled alone.
        """

    def finish_group(self, group: SampleGroup) -> None:
        """See all samples of a prompt when they have their rewards, and change what is to be changed."""


class SingleTurn(Rollouter):
    """A prompt and one response to it."""

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        return Episode(trajectories=[await turns.sample()])


class OpenEpisode:
    """An episode under way: it waits for what the policy samples next, until there is nothing more."""

    def __init__(self, rollouter: Rollouter, prompt: Prompt, request: Request):
        self.turns = Turns(request)
        self.episode: Episode | None = None
        self._steps = rollouter.roll_out(prompt, self.turns)
        self._go_on()

    @property
    def is_complete(self) -> bool:
        """Whether the rollouter is done with it."""
        return self.episode is not None

    def request(self, most: int | None = None) -> Request:
        """What the policy is to sample next: at most so many tokens.

        The seed is that of the whole, and the sampler draws by the absolute position of a token, so
        that under the same weights tokens are the same in one stretch or in many.
        """
        whole, left = self.turns.request, self.turns.num_left
        params = replace(whole.params, max_new_tokens=left if most is None else min(left, most))
        return replace(whole, prompt_ids=self.turns.trajectory.token_ids, params=params)

    def add(self, answer: Completion) -> None:
        """Go on with what was sampled for `request`."""
        self._take(self.turns.trajectory.plus(answer))

    def resume(self, trajectory: Trajectory) -> None:
        """Go on with all that was sampled so far; the rollouter gives anew what it gave in between.

        Raises ValueError if it gives other tokens.
        """
        for end in trajectory.ends_of_answers:
            self.turns.trajectory = trajectory.until(end)
            self._go_on()
            again, before = self.turns.trajectory.token_ids, trajectory.token_ids
            if again != before[: len(again)] or (self.is_complete and again != before):
                raise ValueError(f"the rollouter gives other tokens than before after token {end}")
        self._take(trajectory)

    def _take(self, trajectory: Trajectory) -> None:
        self.turns.trajectory = trajectory
        has_stopped = trajectory.finish_reason == FinishReason.STOP or not self.turns.num_left
        if has_stopped and trajectory.sampled[-1]:
            self._go_on()

    def _go_on(self) -> None:
        try:
            waits_for = self._steps.send(None)
        except StopIteration as end:
            self.episode = end.value
        else:
            if not isinstance(waits_for, _Asked):
                raise TypeError(
                    f"a rollouter waits for {waits_for!r}: it may for turns.sample() alone"
                )


class _Asked:
    """What a rollouter waits for: that the policy has gone on."""

    def __await__(self) -> Generator[_Asked, None, None]:
        yield self
