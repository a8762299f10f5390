"""Validation of an episode function's result, and its conversion into samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from onpolicy.errors import AgentError
from onpolicy.rollout.branches import learnt_once, order_of, require_own
from onpolicy.rollout.episodes import Episode, Turns
from onpolicy.rollout.statistics import COUNTED
from onpolicy.system.json_values import default
from onpolicy.token_weights import by_term, checked_numbers, checked_weights, listed
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample

Check = Callable[[str, Any, int, str], list[float]]


def result_of(found: Episode, branches: Collection[Turns]) -> Episode:
    """Return the episode of a function's result: every sampled token is learnt once.

    Raises AgentError where nothing was sampled, and for values that do not fit the trajectories.
    """
    kept: Sequence[Turns | Trajectory] = found.trajectories or ()
    if found.trajectories is None:
        ordered = sorted(branches, key=lambda branch: order_of(branch.key))
        kept = [branch for branch in ordered if branch.answers]
    if not kept:
        raise AgentError("ended without anything sampled", reason="result")
    whole = [each.trajectory if isinstance(each, Turns) else each for each in kept]
    require_own(whole, [branch.trajectory for branch in branches])
    return with_learnt(found, whole, learnt_once(whole))


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise _nonsense(str(error)) from None


@_refusing()
def with_learnt(
    episode: Episode, whole: Sequence[Trajectory], learnt: Sequence[Trajectory]
) -> Episode:
    """Return the episode with the trajectories to learn from, and the rewards of their tokens.

    whole: the same trajectories as the function sees them, to which its rewards refer. A token that
    is given in one and was sampled in the other is rewarded where it is learnt, in an earlier
    trajectory. Raises AgentError for rewards or metrics of a wrong length or not finite, and for
    info that JSON cannot hold.
    """
    _require_one_kind(episode)
    reward, rewards, token_rewards = episode.reward, episode.rewards, episode.token_rewards
    if reward is not None:
        (reward,) = checked_numbers("reward", [reward], 1, "the episode")
    if rewards is not None:
        rewards = checked_numbers("rewards", rewards, len(whole), "its trajectories")
    if token_rewards is not None:
        token_rewards = _of_learnt("token_rewards", token_rewards, whole, learnt)
    token_weights = {
        term: _of_learnt(f"token_weights[{term!r}]", each, whole, learnt, checked_weights)
        for term, each in by_term(episode.token_weights).items()
    }
    return replace(
        episode,
        trajectories=[*learnt],
        reward=reward,
        rewards=rewards,
        token_rewards=token_rewards,
        token_weights=token_weights,
        metrics=_checked_metrics(episode.metrics),
        info=_as_json(episode.info),
    )


def _require_one_kind(episode: Episode) -> None:
    kinds = ("reward", "rewards", "token_rewards")
    given = [kind for kind in kinds if getattr(episode, kind) is not None]
    if len(given) > 1:
        raise _nonsense(
            f"{' and '.join(given)}: an episode says its rewards once. Give one of them; a reward of "
            "the whole can be put on the last token"
        )


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


def sample_of(
    prompt: Prompt,
    place: int,
    episode: Episode,
    trajectories: Sequence[Trajectory],
    number: int,
    text: str,
) -> Sample:
    """Return the sample of trajectory `number` of an episode from `with_learnt`.

    place: the episode's index among its prompt's. text: the sampled text.
    """
    rewards = _rewards(episode, len(trajectories))
    return Sample(
        prompt=prompt,
        sample_index=place,
        number=number,
        trajectory=trajectories[number],
        response=text,
        reward=0.0 if rewards is None else rewards[number],
        is_rewarded=rewards is not None,
        token_rewards=None if episode.token_rewards is None else [*episode.token_rewards[number]],
        token_weights={
            term: [*each[number]] for term, each in by_term(episode.token_weights).items()
        },
        metrics={**episode.metrics},
        info={**episode.info},
    )


def _rewards(episode: Episode, num_trajectories: int) -> list[float] | None:
    """Return the reward of each trajectory: its own, the episode's, or the sum over all its tokens,
    rounded once; None if a reward function computes it."""
    if episode.rewards is not None:
        return [*episode.rewards]
    whole = episode.reward
    if episode.token_rewards is not None:
        whole = math.fsum(reward for each in episode.token_rewards for reward in each)
    return None if whole is None else [whole] * num_trajectories
