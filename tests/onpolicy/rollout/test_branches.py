"""Episodes of several branches, whose functions are random programs, without engines."""

import asyncio
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import AgentError
from onpolicy.rollout.branches import learnt_once
from onpolicy.rollout.episodes import Episode, Rollouter, SingleTurn
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rounds import FreeJob, Round
from onpolicy.trajectory import FinishReason, Span
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.episodes import asked_for, drive
from tests.support.samples import make_completion

END, LONGEST = 1, 14
PROMPT = Prompt(index=0, prompt_ids=[7, 8], label="", text="")
PARAMS = SamplingParams(temperature=0.5, max_new_tokens=LONGEST, stop_token_ids=(END,))

samples = st.tuples(st.just("sample"), st.none() | st.integers(1, 4), st.sampled_from([None, 0.9]))
appends = st.tuples(st.just("append"), st.integers(1, 3))
programs = st.recursive(
    st.lists(samples | appends, max_size=3),
    lambda inner: st.lists(
        samples | appends | st.tuples(st.just("fork"), st.floats(0, 1), inner), max_size=4
    ),
    max_leaves=6,
)


class Runs(Rollouter):
    """Runs a program on a branch; forks run beside it."""

    def __init__(self, program):
        self.program = program

    async def roll_out(self, prompt, turns):
        await self.run(turns, [("sample", 3, None), *self.program])
        return Episode()

    async def run(self, turns, program):
        forks = []
        for what, *how in program:
            await asyncio.sleep(0)
            if what == "append":
                turns.append([20 + len(turns.trajectory.token_ids)] * how[0])
            elif what == "sample":
                if turns.has_stopped:
                    turns.append([9])
                await turns.sample(max_tokens=how[0], temperature=how[1])
            else:
                length = 1 + int(how[0] * (len(turns.trajectory.token_ids) - 1))
                forks.append(asyncio.create_task(self.run(turns.fork(length), how[1])))
        await asyncio.gather(*forks)


def open_episode(program):
    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    return OpenEpisode(Runs(program), PROMPT, request)


def answer(request, most=LONGEST):
    """A token is decided by the seed and all tokens before it, as the engines' are."""
    ids = []
    while len(ids) < min(request.params.max_new_tokens, most):
        key = (request.sampling_seed, request.params.temperature, *request.prompt_ids, *ids)
        ids.append(random.Random(str(key)).choice([END, 5, 6]))
        if ids[-1] == END:
            break
    reason = FinishReason.STOP if ids[-1:] == [END] else FinishReason.LENGTH
    spans = (Span(version=0, start=0, end=len(ids)),) if ids else ()
    return make_completion(ids, [-0.5 * x for x in ids], finish_reason=reason, spans=spans)


def whole(program):
    episode = open_episode(program)
    job = Round([episode], None, 0)
    drive(job, answer)
    return episode, job.num_tokens


@given(programs, st.integers(1, 5), st.integers(0, 99).map(random.Random))
def test_neither_the_order_of_arrivals_nor_the_rounds_change_a_branch(program, most, chance):
    expected, num_tokens = whole(program)
    episode, drawn = open_episode(program), 0
    while not episode.is_complete:
        job = Round([episode], most, 0)
        for _ in asked_for(job):
            number = chance.choice(job.missing)
            job.add(number, answer(job.requests[number]))
        drawn += job.num_tokens
    assert episode.trajectories == expected.trajectories
    assert drawn == num_tokens


@given(programs)
def test_every_sampled_token_is_learnt_once(program):
    episode, num_tokens = whole(program)
    assert sum(trajectory.num_sampled for trajectory in episode.trajectories) == num_tokens
    assert len(episode.record()) == len(episode.branches)


@given(programs, st.integers(0, 6), st.integers(0, 3))
def test_an_episode_that_is_interrupted_anywhere_goes_on_to_the_same_tokens(program, count, part):
    """With what there is of answers under way, by another process than the one that began it."""
    expected, _ = whole(program)
    before, after = open_episode(program), open_episode(program)
    job = FreeJob(0, lambda episode: None)
    job.begin([before])
    for _, number in zip(range(count), asked_for(job), strict=False):
        job.add(number, answer(job.requests[number]))
    job.interrupt()
    for number in job.missing:
        begun = answer(job.requests[number], part)
        if begun.finish_reason != FinishReason.STOP:
            begun = dataclasses.replace(begun, finish_reason=FinishReason.ABORT)
        job.add(number, begun)
    after.resume(before.record())
    before.end()
    drive(Round([after], None, 0), answer)
    assert [t.token_ids for t in after.trajectories] == [t.token_ids for t in expected.trajectories]
    assert after.trajectories == expected.trajectories


def test_what_is_cut_can_be_gone_on_with_as_if_it_had_not_been():
    class Cut(Rollouter):
        async def roll_out(self, prompt, turns):
            while turns.num_left and not turns.has_stopped:
                answer = await turns.sample(max_tokens=1)
                assert len(answer.token_ids) == len(answer.log_probs) == 1

    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=4, params=PARAMS)
    cut, uncut = (OpenEpisode(each, PROMPT, request) for each in (Cut(), SingleTurn()))
    drive(Round([cut, uncut], None, 0), answer)
    assert cut.trajectories == uncut.trajectories and len(cut.record()[0].answers) > 1


def test_forks_of_the_same_tokens_sample_others_and_by_their_keys_the_same():
    class Forks(Rollouter):
        async def roll_out(self, prompt, turns):
            one, two = turns.fork(key="a"), turns.fork(key="b")
            await asyncio.gather(one.sample(), two.sample())
            return Episode(trajectories=[two, one])

    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    episode = OpenEpisode(Forks(), PROMPT, request)
    drive(Round([episode], None, 0), answer)
    two, one = episode.trajectories
    assert one.token_ids != two.token_ids
    assert one.forks == (("a", 2),) and two.forks == (("b", 2),)


def test_a_branch_that_is_returned_twice_is_a_failed_episode():
    """And not one that is trained on twice."""

    class Twice(Rollouter):
        async def roll_out(self, prompt, turns):
            await turns.sample()
            return Episode(trajectories=[turns, turns.fork()])

    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    with pytest.raises(AgentError, match="number 1, no token of which was sampled") as ended:
        drive(Round([OpenEpisode(Twice(), PROMPT, request)], None, 0), answer)
    assert ended.value.reason == "result"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"token_ids": [*t.token_ids[:-1], t.token_ids[-1] + 1]},  # tokenised again
        lambda t: {"sampled": [*t.sampled[1:], t.sampled[0]]},  # a mask that is shifted by one
        lambda t: {"rollout_log_probs": [x - 1e-7 for x in t.rollout_log_probs]},
    ],
)
def test_what_a_function_makes_up_is_a_failed_episode(change):
    class MakesUp(Rollouter):
        async def roll_out(self, prompt, turns):
            await turns.sample()
            return Episode(
                trajectories=[dataclasses.replace(turns.trajectory, **change(turns.trajectory))]
            )

    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    with pytest.raises(AgentError, match="number 0, that is none of its turns'"):
        drive(Round([OpenEpisode(MakesUp(), PROMPT, request)], None, 0), answer)


def test_tokens_that_are_equal_by_chance_are_learnt_in_both():
    (trajectory,) = whole([])[0].trajectories
    one = dataclasses.replace(trajectory, forks=(("0", 2),))
    other = dataclasses.replace(trajectory, forks=(("1", 2),))
    assert learnt_once([one, other]) == [one, other]
