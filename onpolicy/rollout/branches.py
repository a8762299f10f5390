"""Tokens shared by branches of an episode: each sampled token is learnt once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from onpolicy.errors import AgentError
from onpolicy.rollout.turns import BranchRecord
from onpolicy.trajectory import Trajectory
from onpolicy.types import BranchKey, Spans


def order_of(key: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the sort key of a branch: the first branch comes first, numbers sort as numbers."""
    return [(len(part), part) for part in key]


def learnt_once(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories, with each sampled token counted as sampled only in the first that
    has it.

    Raises AgentError for a trajectory that has no sampled token of its own.
    """
    found = list[Trajectory]()
    for i, trajectory in enumerate(trajectories):
        shared = max((num_shared(trajectory, other) for other in trajectories[:i]), default=0)
        own = trajectory.as_given(shared)
        if not own.num_sampled:
            raise AgentError(
                f"returned a trajectory, number {i}, no token of which was sampled that an earlier one "
                "does not hold",
                reason="result",
            )
        found.append(own)
    return found


def said_by(branches: Sequence[BranchRecord]) -> tuple[Trajectory, ...]:
    """Return the readable trajectories of an attempt: every sampled token once, without branches
    that have no token of their own (but for the first)."""
    found = list[Trajectory]()
    for number, branch in enumerate(branches):
        whole = [each.trajectory for each in branches[:number]]
        shared = max((num_shared(branch.trajectory, other) for other in whole), default=0)
        own = branch.trajectory.as_given(shared)
        if own.num_sampled or not found:
            found.append(replace(own, routed_experts=None))
    return tuple(found)


def require_own(returned: Iterable[Trajectory], branches: Sequence[Trajectory]) -> None:
    """Raise AgentError unless each returned trajectory is one of the branches or the beginning of
    one.

    Tokens that were not provably sampled must not be learnt.
    """
    for i, trajectory in enumerate(returned):
        length = len(trajectory.token_ids)
        known = (branch.until(length) for branch in branches if branch.forks == trajectory.forks)
        if not any(
            (each.token_ids, each.sampled, each.rollout_log_probs)
            == (trajectory.token_ids, trajectory.sampled, trajectory.rollout_log_probs)
            for each in known
        ):
            raise AgentError(
                f"returned a trajectory, number {i}, that is none of its turns'", reason="result"
            )


def require_possible(past: Mapping[BranchKey, BranchRecord], prompt_ids: list[int]) -> None:
    """Raise ValueError unless `past` can be the record of an episode with this prompt."""
    first = past.get(())
    if first is None or first.trajectory.token_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError("branches: none begins with the prompt")
    for each in past.values():
        ends = [end for end, _ in each.answers]
        if sorted({*ends}) != ends or (ends and ends[-1] > len(each.trajectory.token_ids)):
            raise ValueError(f"answers={ends}: must be ends of answers in their order")


def spans_of(branches: Iterable[BranchRecord]) -> dict[BranchKey, Spans]:
    """Return (version, number of tokens) of each branch's own sampled spans; branches without are
    left out."""
    found = {}
    for branch in branches:
        forks = branch.trajectory.forks
        own = branch.trajectory.as_given(forks[-1][1] if forks else 0)
        if own.spans:
            found[branch.key] = [(span.version, span.end - span.start) for span in own.spans]
    return found


def num_shared(one: Trajectory, other: Trajectory) -> int:
    """Return the length of the common prefix that was sampled once, and is not merely equal."""
    shared = 0
    for mine, theirs in zip(one.stretches, other.stretches, strict=False):
        if mine[0] != theirs[0]:
            break
        shared = min(mine[2], theirs[2])
    return shared
