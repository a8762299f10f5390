"""Interface of a rollout's episodes, in which a policy samples and receives tokens.

A rollouter says what happens in an episode, and may wait for anything. Schedules decide when the
policy samples, from which weights, and in how many pieces: the rollouter sees none of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onpolicy.errors import AgentError
from onpolicy.rollout.failures import ContextExceededError
from onpolicy.rollout.observations import Json
from onpolicy.rollout.turns import Turns
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, SampleGroup, Term

__all__ = ["ContextExceededError", "Episode", "Rollouter", "SingleTurn", "Turns"]

ByToken = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The result of one attempt at a prompt."""

    trajectories: Sequence[Turns | Trajectory] | None = None
    """The trajectories to reward and learn from; None: all branches that have sampled, by their
    keys. A sampled token that several hold is learnt in the first of them."""

    reward: float | None = None
    """The reward of all trajectories; None: the run's reward function computes it."""

    rewards: Sequence[float] | None = None
    """The reward of each trajectory."""

    token_rewards: ByToken | None = None
    """The rewards of sampled tokens, [R] for each trajectory."""

    token_weights: ByToken | Mapping[Term, ByToken] | None = None
    """The factors on each token's objective in the loss, [R] for each trajectory, 0 or more; or a
    mapping of them by term of the objective. None, and a missing term: 1. Denominators and all
    other terms stay as they are (prime-rl's component weights)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Json] = field(default_factory=dict)
    """Information to inspect later: tool calls, why the episode ended."""

    @staticmethod
    def of(returned: Episode | float | Sequence[Turns | Trajectory] | None) -> Episode:
        """Return the episode that a function's return value means: None for all branches, a number
        for their reward, or some of the branches. Raises AgentError for anything else."""
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
    """A rollouter of prompts, one for a whole run: state of an episode stays in `roll_out`."""

    @abstractmethod
    async def roll_out(self, prompt: Prompt, turns: Turns) -> Episode | None:
        """Make one attempt at a prompt; it may wait, and fork `turns`. None: all branches are learnt.

        It is called again for an episode that a checkpoint interrupts, and gets the same answers as
        before; so what it inserts must depend only on its arguments, on sampled tokens and on its
        observations.
        """

    async def ready(self) -> None:
        """Wait until an episode can begin. Raises ConfigError if none ever can."""

    def close(self) -> None:
        """Clean up after the run."""

    def finish_group(self, group: SampleGroup) -> None:
        """Take all samples of a prompt once they have their rewards, and modify them in place."""


class SingleTurn(Rollouter):
    """A rollouter that samples one response to each prompt."""

    async def roll_out(self, prompt: Prompt, turns: Turns) -> None:
        await turns.sample()
