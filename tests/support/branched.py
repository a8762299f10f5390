"""Episodes with branches, as a trainer gets them: random tokens with its own log-probabilities."""

import random
from dataclasses import replace

from onpolicy.rollout.results import learnt_once
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample
from tests.support.samples import make_completion

REWARDS = (1 / 64, -1 / 128, 1 / 32, 1 / 256)
"""Of the episodes, which have 3, 1, 1 and 1 trajectories."""

NUM_LEARNT = (8, 4, 2, 2)
"""Sampled tokens of each episode: of the first 4, 3 and 1. All numbers are sums of few powers of two, so
that a loss by hand has no rounding."""


def _episodes(rng):
    """Trajectories whose log-probabilities are still to come."""

    def tokens(count):
        return [rng.randrange(2, 137) for _ in range(count)]

    def answered(trajectory, count):
        return trajectory.plus(make_completion(tokens(count), [0.0] * count), 1.0)

    begun = answered(Trajectory.begin(tokens(3)), 2)
    fork = answered(begun.forked(5, "0").given(tokens(1)), 3)
    yield [
        answered(begun.given(tokens(2)), 2),
        fork,
        answered(fork.forked(9, "0").given(tokens(4)), 1),
    ]
    for count in NUM_LEARNT[1:]:
        yield [answered(Trajectory.begin(tokens(4)), count)]


def branched_samples(trainer, *, twice=False, token_rewards=None):
    """The samples of two groups of two episodes.

    twice: the tokens that branches share are learnt in each of them. token_rewards: of the 8 tokens of
    the first episode.
    """
    found = []
    for number, drawn in enumerate(_episodes(random.Random(0))):
        whole = [_scored(trainer, trajectory) for trajectory in drawn]
        rewards = iter(token_rewards or ())
        for trajectory in whole if twice else learnt_once(whole):
            mine = [next(rewards) for _ in range(trajectory.num_sampled)] if token_rewards else None
            sample = Sample(
                prompt=Prompt(index=number // 2, prompt_ids=[2], label="", text=""),
                sample_index=number % 2,
                trajectory=trajectory,
                reward=REWARDS[number],
                token_rewards=mine if number == 0 else None,
                group=number // 2,
                episode=number,
            )
            found.append(sample)
        token_rewards = None
    return found


def _scored(trainer, trajectory):
    (log_probs,) = trainer.log_probs([trajectory.token_ids], [1], 1.0)
    pairs = zip(log_probs.tolist(), trajectory.sampled[1:], strict=True)
    return replace(trajectory, rollout_log_probs=[x for x, is_sampled in pairs if is_sampled])
