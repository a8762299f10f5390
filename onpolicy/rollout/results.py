"""Results of episode functions, and the samples that are made of them.

Results are validated first: tokens must have been sampled on the episode's branches, and rewards
must fit them. Branches share tokens, and each sampled token is learnt once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from onpolicy.errors import AgentError
from onpolicy.rollout.rollouter import Episode, Turns
from onpolicy.rollout.statistics import COUNTED
from onpolicy.system.json_values import default
from onpolicy.token_weights import by_term, checked_numbers, checked_weights, listed
from onpolicy.trajectory import Trajectory
from onpolicy.types import BranchKey, Prompt, Sample, Spans

Check = Callable[[str, Any, int, str], list[float]]


def samples_of(
    found: Episode, prompt: Prompt, index: int, branches: Collection[Turns]
) -> list[Sample]:
    """Return the samples of the result of an episode's function; every sampled token is in one.

    index: the episode's among its prompt's. Raises AgentError where nothing was sampled, and for values
    that do not fit.
    """
    kept: Sequence[Turns | Trajectory] = found.trajectories or ()
    if found.trajectories is None:
        ordered = sorted(branches, key=lambda branch: order_of(branch.key))
        kept = [branch for branch in ordered if branch.trajectory.answers]
    if not kept:
        raise AgentError("ended without anything sampled", reason="result")
    whole = [each.trajectory if isinstance(each, Turns) else each for each in kept]
    require_own(whole, [branch.trajectory for branch in branches])
    return rewarded(found, prompt, index, whole)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _nonsense(str(error)) from None


@_refusing()
def rewarded(
    found: Episode, prompt: Prompt, index: int, whole: Sequence[Trajectory]
) -> list[Sample]:
    """Return a sample of each trajectory, with the rewards of the tokens that are learnt in it.

    whole: the trajectories as the function sees them, to which its rewards refer. A token that is
    given in one and was sampled in the other is rewarded where it is learnt, in an earlier trajectory.
    Raises AgentError for rewards or metrics of wrong length or not finite, and info that is no JSON.
    """
    _require_one_kind(found)
    learnt, given = learnt_once(whole), found.token_rewards
    by_token = None if given is None else _of_learnt("token_rewards", given, whole, learnt)
    rewards = _rewards(found, by_token, len(whole))
    weights = {
        term: _of_learnt(f"token_weights[{term!r}]", each, whole, learnt, checked_weights)
        for term, each in by_term(found.token_weights).items()
    }
    metrics, info = _checked_metrics(found.metrics), _as_json(found.info)
    return [
        Sample(
            prompt=prompt,
            sample_index=index,
            number=i,
            trajectory=trajectory,
            reward=0.0 if rewards is None else rewards[i],
            is_rewarded=rewards is not None,
            token_rewards=None if by_token is None else by_token[i],
            token_weights={term: each[i] for term, each in weights.items()},
            metrics={**metrics},
            info={**info},
        )
        for i, trajectory in enumerate(learnt)
    ]


def _require_one_kind(episode: Episode) -> None:
    kinds = ("reward", "rewards", "token_rewards")
    given = [kind for kind in kinds if getattr(episode, kind) is not None]
    if len(given) > 1:
        raise _nonsense(
            f"{' and '.join(given)}: an episode says its rewards once. Give one of them; a reward of "
            "the whole can be put on the last token"
        )


def _rewards(
    found: Episode, by_token: Sequence[Sequence[float]] | None, count: int
) -> list[float] | None:
    """Return the reward of each trajectory: its own, the episode's, or the sum over all its tokens,
    rounded once; None if a reward function computes it."""
    if found.rewards is not None:
        return checked_numbers("rewards", found.rewards, count, "its trajectories")
    if by_token is not None:
        return [math.fsum(reward for each in by_token for reward in each)] * count
    if found.reward is not None:
        return checked_numbers("reward", [found.reward], 1, "the episode") * count
    return None


def _of_learnt(
    name: str,
    by_token: Any,
    whole: Sequence[Trajectory],
    learnt: Sequence[Trajectory],
    check: Check = checked_numbers,
) -> list[list[float]]:
    lists = listed(name, by_token, "lists")
    if len(lists) != len(whole):
        raise _nonsense(
            f"{name}={len(lists)} lists: the episode has {len(whole)} trajectories. Give "
            "one list for each"
        )
    numbers = [
        check(f"{name}[{i}]", each, known.num_sampled, f"sampled tokens of trajectory {i}")
        for i, (each, known) in enumerate(zip(lists, whole, strict=True))
    ]
    parts = zip(numbers, learnt, strict=True)
    return [each[len(each) - own.num_sampled :] for each, own in parts]


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if taken := [name for name in metrics if name in COUNTED]:
        raise _nonsense(f"metrics={taken[0]!r}: the run counts this itself. Give it another name")
    return {
        str(name): checked_numbers(f"metrics[{name!r}]", [value], 1, "the metric")[0]
        for name, value in metrics.items()
    }


def _as_json(info: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**json.loads(json.dumps({**info}, allow_nan=False, default=default))}
    except (TypeError, ValueError, RecursionError) as error:
        raise _nonsense(f"info={str(info)[:60]}: must be what JSON can say ({error})") from error


def _nonsense(what: str) -> AgentError:
    return AgentError(f"returned {what}", reason="result")


def require_own(returned: Iterable[Trajectory], branches: Sequence[Trajectory]) -> None:
    """Raise AgentError unless each returned trajectory begins a branch, as it was sampled."""
    for i, trajectory in enumerate(returned):
        length = len(trajectory.token_ids)
        known = (branch.until(length) for branch in branches if branch.forks == trajectory.forks)
        if not any(
            (each.token_ids, each.sampled, each.rollout_log_probs)
            == (trajectory.token_ids, trajectory.sampled, trajectory.rollout_log_probs)
            for each in known
        ):
            raise _nonsense(f"a trajectory, number {i}, that is none of its turns'")


def learnt_once(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories, with each sampled token learnt in the first that has it.

    Raises AgentError for a trajectory that has no sampled token of its own.
    """
    found = [*_own_parts(trajectories)]
    for i, own in enumerate(found):
        if not own.num_sampled:
            raise _nonsense(
                f"a trajectory, number {i}, no token of which was sampled that an earlier one does not "
                "hold"
            )
    return found


def _own_parts(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Yield each trajectory with what an earlier one holds as given."""
    for i, trajectory in enumerate(trajectories):
        shared = max((num_shared(trajectory, other) for other in trajectories[:i]), default=0)
        yield trajectory.as_given(shared)


def said_by(branches: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Return the readable trajectories of an attempt: every sampled token once, without branches
    that have no token of their own (but for the first)."""
    return tuple(
        replace(own, routed_experts=None)
        for i, own in enumerate(_own_parts(branches))
        if own.num_sampled or i == 0
    )


def num_shared(one: Trajectory, other: Trajectory) -> int:
    """Return the length of the common prefix that was sampled once, and is not merely equal."""
    shared = 0
    for mine, theirs in zip(one.stretches, other.stretches, strict=False):
        if mine[0] != theirs[0]:
            break
        shared = min(mine[2], theirs[2])
    return shared


def spans_of(branches: Iterable[Trajectory]) -> dict[BranchKey, Spans]:
    """Return (version, number of tokens) of the spans of each branch that has sampled itself."""
    found = {}
    for branch in branches:
        own = branch.as_given(branch.forks[-1][1] if branch.forks else 0)
        if own.spans:
            found[branch.key] = [(span.version, span.end - span.start) for span in own.spans]
    return found


def order_of(key: tuple[str, ...]) -> list[tuple[int, str]]:
    """Return the sort key of a branch: the first branch comes first, numbers sort as numbers."""
    return [(len(part), part) for part in key]
