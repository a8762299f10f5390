"""What branches of an episode share: a sampled token is learnt once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from onpolicy.errors import AgentError
from onpolicy.rollout.turns import BranchRecord
from onpolicy.trajectory import Trajectory
from onpolicy.types import BranchKey, Spans


def order_of(key: tuple[str, ...]) -> list[tuple[int, str]]:
    """What branches are sorted by: the one that others were forked from first, numbers as numbers."""
    return [(len(part), part) for part in key]


def learnt_once(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories, each sampled token counted as such in the first of them alone.

    Raises AgentError for one that has nothing of its own to learn.
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
    """What an attempt has come to, to be read: every sampled token once, and no branch that has none of
    its own but the first."""
    found = list[Trajectory]()
    for number, branch in enumerate(branches):
        whole = [each.trajectory for each in branches[:number]]
        shared = max((num_shared(branch.trajectory, other) for other in whole), default=0)
        own = branch.trajectory.as_given(shared)
        if own.num_sampled or not found:
            found.append(replace(own, routed_experts=None))
    return tuple(found)


def require_own(returned: Iterable[Trajectory], branches: Sequence[Trajectory]) -> None:
    """Raise AgentError unless each that was returned is one of the branches, or the beginning of one:
    what nobody can prove to have been sampled is not learnt."""
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
    """Raise ValueError unless this can be what an episode with the prompt has come to."""
    first = past.get(())
    if first is None or first.trajectory.token_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError("branches: none begins with the prompt")
    for each in past.values():
        ends = [end for end, _ in each.answers]
        if sorted({*ends}) != ends or (ends and ends[-1] > len(each.trajectory.token_ids)):
            raise ValueError(f"answers={ends}: must be ends of answers in their order")


def spans_of(branches: Iterable[BranchRecord]) -> dict[BranchKey, Spans]:
    """What each branch has sampled itself from which versions; those that have not are left out."""
    found = {}
    for branch in branches:
        forks = branch.trajectory.forks
        own = branch.trajectory.as_given(forks[-1][1] if forks else 0)
        if own.spans:
            found[branch.key] = [(span.version, span.end - span.start) for span in own.spans]
    return found


def num_shared(one: Trajectory, other: Trajectory) -> int:
    """The tokens at the beginning of both that are the same ones: sampled once, and not merely equal."""
    shared = 0
    for mine, theirs in zip(one.stretches, other.stretches, strict=False):
        if mine[0] != theirs[0]:
            break
        shared = min(mine[2], theirs[2])
    return shared
