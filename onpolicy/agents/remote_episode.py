"""Episode whose function runs in a worker: calls of its branches, and its result."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from onpolicy.agents.messages import Message
from onpolicy.errors import AgentError
from onpolicy.rollout.episodes import Episode
from onpolicy.rollout.turns import Turns
from onpolicy.types import Prompt


class RemoteEpisode:
    """An attempt at a prompt, and its branches by their numbers in the worker."""

    def __init__(self, number: int, prompt: Prompt, turns: Turns):
        self.number, self.prompt = number, prompt
        self.branches = [turns]
        self.outcome: asyncio.Future[Episode] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """The name of the episode, for messages."""
        return self.branches[0].episode.name

    def begins(self) -> Message:
        """Return the first message to the worker."""
        turns = self.branches[0]
        most = turns.episode.rules.max_context_len
        given = {"prompt": self.prompt, "request": turns.request, "max_context_len": most}
        return {"kind": "begin", "episode": self.number, **given}

    def end(self, said: Message) -> None:
        """Set the result from the worker's message that the function has returned."""
        branches = said["branches"]
        if not self.outcome.done():
            self.outcome.set_result(
                Episode(
                    trajectories=None if branches is None else [self.branches[n] for n in branches],
                    reward=said["reward"],
                    rewards=said["rewards"],
                    token_rewards=said["token_rewards"],
                    token_weights=said["token_weights"],
                    metrics=said["metrics"],
                    info=said["info"],
                )
            )

    def fail(self, error: Exception) -> None:
        """Set the error; the first of several counts."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def append(self, branch: Turns, more: Any) -> list[int]:
        """Append to a branch; return the tokens that were given."""
        before = len(branch.trajectory.token_ids)
        branch.append(more)
        return branch.trajectory.token_ids[before:]

    def fork(self, branch: Turns, length: int | None, key: str | None) -> Message:
        """Fork a branch; return the worker's description of the new branch."""
        made = branch.fork(length, key=key)
        self.branches.append(made)
        key, length = made.trajectory.forks[-1]
        seed = made.request.sampling_seed
        return {"branch": len(self.branches) - 1, "length": length, "key": key, "seed": seed}


async def sample(branch: Turns, arguments: Mapping[str, Any]) -> Message:
    """Have the policy go on; return the answer as a message to the worker."""
    before = branch.trajectory
    answer = await branch.sample(**arguments)
    after, count = branch.trajectory, before.num_sampled
    said: Message = {
        "token_ids": answer.token_ids,
        "log_probs": answer.log_probs,
        "finish_reason": str(answer.finish_reason),
        "temperature": after.temperatures[-1] if answer.token_ids else 0.0,
        "weight_version": after.weight_version,
        "num_cached_tokens": after.num_cached_tokens - before.num_cached_tokens,
        "spans": [
            (span.version, max(span.start - count, 0), span.end - count)
            for span in after.spans
            if span.end > count
        ],
        "text": None,
    }
    try:
        said["text"] = answer.text
    except ValueError as error:  # there is no tokenizer
        said["no_text"] = str(error)
    return said


def failure(said: Message) -> AgentError:
    """Return the error in a worker's message about a function that failed."""
    error = AgentError(said["text"], reason=said["reason"])
    error.add_note(said["trace"])
    return error
