"""Episodes of two turns on a real server, trained by the real trainer."""

import asyncio
import dataclasses
import random
from itertools import pairwise

import pytest
import torch

from onpolicy.errors import EngineError, ParityError
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.sample_requests import open_group, sample_groups
from onpolicy.types import Prompt
from tests.support.engines_fixture import make_requests
from tests.support.episodes import Part

GIVEN = [5, 6, 7, 8]
LONGEST = 24


class StopsInTheMiddle(Rollouter):
    """Gives tokens wherever the policy stops, as long as it may sample."""

    async def roll_out(self, prompt, turns):
        while turns.num_left:
            await turns.sample()
            turns.append(GIVEN)
        return Episode()


class Branches(Rollouter):
    """Two turns with a tool between them, and a fork after each, beside the first branch."""

    async def roll_out(self, prompt, turns):
        await turns.sample(max_tokens=6)
        await asyncio.sleep(random.random() * 0.05)
        early = turns.fork(len(turns.trajectory.token_ids) - 2, key="early")
        turns.append(GIVEN)
        late = turns.fork(key="late")
        late.append(GIVEN[:2])
        await asyncio.gather(
            turns.sample(max_tokens=5), early.sample(temperature=0.7), late.sample(temperature=1.3)
        )


def drawn(engines, most, rollouter=None):
    """Twelve episodes, interrupted after so many tokens; any of 30 tokens of 137 ends an answer."""
    rollouter, groups = rollouter or StopsInTheMiddle(), []
    for i, request in enumerate(make_requests(12, seed=7, max_new_tokens=LONGEST)):
        params = dataclasses.replace(
            request.params, stop_token_ids=tuple(range(30)), ignore_eos=False
        )
        prompt = Prompt(index=i, prompt_ids=request.prompt_ids, label="", text="")
        request = dataclasses.replace(request, params=params)
        groups.append(open_group(i, prompt, [request], rollouter))
    while episodes := [each for group in groups for each in group if not each.is_complete]:
        engines.work(Part(episodes, most, engines.weight_version, by_token=True))
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
        dataclasses.replace(s, reward=(-1.0) ** i, group=0, episode=i)
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


def test_turns_that_are_interrupted_have_the_same_tokens_and_bits(engines, samples):
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


@pytest.fixture(scope="module")
def branches(engines):
    return drawn(engines, None, Branches())


def test_every_branch_has_the_log_probabilities_of_the_trainer_at_its_temperatures(
    engines, branches
):
    temperatures = {x for sample in branches for x in sample.trajectory.temperatures}
    assert temperatures == {1.0, 0.7, 1.3} and len(branches) == 36
    count = sum(sample.trajectory.num_sampled for sample in branches)
    metrics = engines.trainer.train(train_samples(branches), 0, [0.0]).metrics
    assert metrics["parity/num_mismatched_tokens"] == 0
    assert metrics["parity/num_compared_tokens"] == count


def test_neither_interruptions_nor_what_tools_take_change_a_branch(engines, branches):
    again = drawn(engines, 4, Branches())
    fields = ("token_ids", "sampled", "rollout_log_probs", "temperatures", "forks")
    for sample, same in zip(branches, again, strict=True):
        assert [getattr(sample.trajectory, f) for f in fields] == [
            getattr(same.trajectory, f) for f in fields
        ]


def tokenised_again(trajectory):
    """One token of the first turn is another, as where its text was split anew."""
    at = trajectory.sampled.index(True)
    token_ids = list(trajectory.token_ids)
    token_ids[at] = (token_ids[at] + 1) % 137
    return {"token_ids": token_ids}


def shifted(trajectory):
    return {"sampled": [trajectory.sampled[-1], *trajectory.sampled[:-1]]}


def at_another_temperature(trajectory):
    return {"temperatures": [1.1] * trajectory.num_sampled}


@pytest.mark.parametrize("fault", [tokenised_again, shifted, at_another_temperature])
def test_a_fault_in_one_branch_is_found(engines, branches, fault):
    whole = next(s for s in branches if s.trajectory.sampled[-3:] == [False, True, True])
    changed = dataclasses.replace(whole.trajectory, **fault(whole.trajectory))
    faulty = [dataclasses.replace(s, trajectory=changed) if s is whole else s for s in branches]
    with pytest.raises(ParityError, match=r"^[1-9]\d* of "):
        engines.trainer.train(train_samples(faulty), 0, [0.0])


def test_an_answer_from_another_version_is_found(engines, monkeypatch):
    monkeypatch.setattr(engines, "weight_version", engines.weight_version + 1)
    with pytest.raises(EngineError, match="an engine sampled from other weights"):
        drawn(engines, None, Branches())
