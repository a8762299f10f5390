"""Episodes of two turns on a real server, trained by the real trainer."""

import dataclasses
from itertools import pairwise

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.rollout.episodes import Episode, Rollouter
from onpolicy.rollout.rounds import Round
from onpolicy.rollout.sampling import open_group, sample_groups
from onpolicy.types import Prompt, TrainSample
from tests.support.engines_fixture import make_requests

GIVEN = [5, 6, 7, 8]
LONGEST = 24


class StopsInTheMiddle(Rollouter):
    """Gives tokens wherever the policy stops, as long as it may sample."""

    async def roll_out(self, prompt, turns):
        while turns.num_left:
            await turns.sample()
            turns.append(GIVEN)
        return Episode()


def drawn(engines, most):
    """Twelve episodes in rounds of so many tokens; any of 30 tokens of 137 ends an answer."""
    groups = []
    for i, request in enumerate(make_requests(12, seed=7, max_new_tokens=LONGEST)):
        params = dataclasses.replace(
            request.params, stop_token_ids=tuple(range(30)), ignore_eos=False
        )
        prompt = Prompt(index=i, prompt_ids=request.prompt_ids, label="", text="")
        request = dataclasses.replace(request, params=params)
        groups.append(open_group(i, prompt, [request], StopsInTheMiddle()))
    while episodes := [episode for group in groups for episode in group.unfinished]:
        engines.work(Round(episodes, most, engines.weight_version, by_token=True))
    found = sample_groups(groups, lambda token_ids: [""] * len(token_ids))
    return [sample for group in found for sample in group.samples]


def num_answers(sampled):
    """Stretches of sampled tokens that others were given after."""
    return sum(here and not then for here, then in pairwise(sampled))


@pytest.fixture(scope="module")
def samples(engines):
    return drawn(engines, None)


def train_samples(samples):
    return [
        TrainSample(sample=dataclasses.replace(s, reward=(-1.0) ** i), group=0, episode=i)
        for i, s in enumerate(samples)
    ]


def test_every_token_of_every_turn_has_the_log_probability_of_the_trainer(engines, samples):
    turns = [num_answers(sample.trajectory.sampled) for sample in samples]
    assert min(turns) >= 1 and max(turns) >= 3
    assert all(sample.trajectory.num_sampled == LONGEST for sample in samples)
    assert sum(sample.num_cached_tokens for sample in samples) > 0
    metrics = engines.trainer.train(train_samples(samples), 0, [0.0]).metrics
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert metrics["parity/num_compared_tokens"] == 12 * LONGEST


def test_turns_that_are_drawn_in_rounds_have_the_same_tokens_and_bits(engines, samples):
    again = drawn(engines, 5)
    for sample, same in zip(samples, again, strict=True):
        assert same.token_ids == sample.token_ids
        assert same.trajectory.sampled == sample.trajectory.sampled
        assert same.rollout_log_probs == sample.rollout_log_probs


def test_one_bit_in_the_last_turn_is_found(engines, samples):
    trajectory = samples[3].trajectory
    values = list(trajectory.rollout_log_probs)
    values[-1] = torch.nextafter(torch.tensor(values[-1]), torch.tensor(0.0)).item()
    off = dataclasses.replace(trajectory, rollout_log_probs=values)
    changed = [*samples[:3], dataclasses.replace(samples[3], trajectory=off), *samples[4:]]
    with pytest.raises(ParityError, match=rf"^1 of .*prompt 3, sample 0.*position={LONGEST - 1}"):
        engines.trainer.train(train_samples(changed), 0, [0.0])
