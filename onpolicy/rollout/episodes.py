"""How a prompt is rolled out: an episode, in which a policy samples and is given more.

A rollouter says what happens in an episode, and may wait for anything. Schedules say when the policy
goes on, from which weights, and in how many stretches: the rollouter sees none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onpolicy.errors import AgentError
from onpolicy.rollout.failures import ContextExceededError
from onpolicy.rollout.observations import Json
from onpolicy.rollout.turns import Answer, Turns
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, SampleGroup, Term

__all__ = ["Answer", "ContextExceededError", "Episode", "Rollouter", "SingleTurn", "Turns"]

ByToken = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What became of one attempt at a prompt."""

    trajectories: Sequence[Turns | Trajectory] | None = None
    """To be rewarded and learnt from; None: all branches that have sampled, by their keys. A sampled
    token that several hold is learnt in the first of them, and given in the others."""

    reward: float | None = None
    """The one of all; None: the run's reward function says it."""

    rewards: Sequence[float] | None = None
    """One for each trajectory."""

    token_rewards: ByToken | None = None
    """For each trajectory one for each sampled token, [R]."""

    token_weights: ByToken | Mapping[Term, ByToken] | None = None
    """For each trajectory, [R]: what a token's objective is multiplied by in the loss, 0 or more; or, by
    their names, terms of it. None, and of a term that is missing: 1. Denominators and all other terms
    stay as they are (prime-rl's component weights)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Json] = field(default_factory=dict)
    """What is to be seen of it later: tool calls, why it ended."""

    @staticmethod
    def of(returned: Episode | float | Sequence[Turns | Trajectory] | None) -> Episode:
        """What a function means by what it returns: nothing but all branches, their reward, or some of
        them. Raises AgentError for anything else."""
        match returned:
            case Episode():
                return returned
            case None:
                return Episode()
            case bool():
                pass
            case int() | float():
                return Episode(reward=float(returned))
            case [*kept] if kept and all(isinstance(x, Turns | Trajectory) for x in kept):
                return Episode(trajectories=kept)
        raise AgentError(
            f"returned {returned!r:.80}, and must return an Episode, a reward, some of its turns, or "
            "None for all of them",
            reason="result",
        )


class Rollouter(ABC):
    """Rolls prompts out; one for all of a run, so what belongs to an episode stays in `roll_out`."""

    @abstractmethod
    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        """One attempt at a prompt. It may wait for anything, and fork `turns`.

        It is called again for an episode that a checkpoint interrupts, and is answered then as it was
        before; so what it gives must depend on its arguments, on what is sampled and on what it
        observes alone.
        """

    async def ready(self) -> None:
        """Wait until an episode can begin. Raises ConfigError if none ever can."""

    def close(self) -> None:
        """The run has ended."""

    def finish_group(self, group: SampleGroup) -> None:
        """See all samples of a prompt when they have their rewards, and change what is to be changed."""


class SingleTurn(Rollouter):
    """A prompt and one response to it."""

    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode:
        await turns.sample()
        return Episode()
