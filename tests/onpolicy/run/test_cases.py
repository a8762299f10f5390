"""A case asks for the answer that has the token that differs, whichever turn and branch it is of."""

from dataclasses import replace

import pytest

from onpolicy.run.cases import asked_at, first_apart
from tests.support.acting import PARAMS, PROMPT, Draws, roll_out


class Remembers(Draws):
    """Keeps what was asked for, and what was answered."""

    def __init__(self):
        super().__init__()
        self.asked_for = []

    def _answer(self, branch, ask):
        if ask is not None and branch.ask is ask:
            self.asked_for.append((branch.key, branch.episode.request(branch, ask)))
        super()._answer(branch, ask)


async def act(prompt, turns):
    await turns.sample(temperature=0.5)
    turns.append([65])
    fork = turns.fork(key="again")
    await turns.sample(regex="[a-z ]*", stop=["x"])
    turns.append([66])
    await turns.sample()
    await fork.sample(max_tokens=1, temperature=2.0)
    if not fork.has_stopped:
        await fork.sample(temperature=3.0)  # goes on where it was cut
    fork.append([67])
    await fork.fork().sample(temperature=4.0)


@pytest.mark.parametrize("seed", range(9))
def test_every_token_belongs_to_the_request_that_it_answered(seed):
    draws = Remembers()
    episode = roll_out(act, draws, seed=seed, holds_grammars=lambda: True)
    branches = {(len(request.prompt_ids), key): request for key, request in draws.asked_for}
    found = set()
    for trajectory in episode.trajectories:
        for place, is_sampled in enumerate(trajectory.sampled):
            if is_sampled:
                asked = asked_at(episode._request, trajectory, place)
                branch = next(b for b, start, end in trajectory.stretches if start <= place < end)
                key = len(asked.prompt_ids), tuple(key for key, _ in branch)
                known = branches[key]
                assert asked.prompt_ids == known.prompt_ids
                assert asked.sampling_seed == known.sampling_seed
                assert asked.params.temperature == known.params.temperature
                assert asked.params.grammar == known.params.grammar
                end = len(asked.prompt_ids) + asked.params.max_new_tokens
                assert place < end and all(trajectory.sampled[len(asked.prompt_ids) : end])
                found.add(key)
    assert found == {*branches}  # each answer, the cut one and its continuation too
    assert {each.params.temperature for each in branches.values()} >= {0.5, 1.0, 2.0, 4.0}


def test_the_first_token_that_differs_is_found_behind_what_was_given():
    async def two(prompt, turns):
        await turns.sample()
        turns.append([65, 66])
        await turns.sample()

    (trajectory,) = roll_out(two).trajectories
    same = list(trajectory.rollout_log_probs)
    first, last = trajectory.sampled.index(True), len(trajectory.sampled) - 1
    assert first == len(PROMPT.prompt_ids) and PARAMS.temperature == 1.0
    assert first_apart(trajectory, [*same[:-1], float("nan")]) == last
    assert first_apart(trajectory, [same[0] + 1, *same[1:-1], 0.0]) == first
    zero = replace(trajectory, rollout_log_probs=[*same[:-1], 0.0])
    assert first_apart(zero, [*same[:-1], -0.0]) == last
