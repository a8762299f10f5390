"""Episodes of several turns and branches, whose functions may be random programs, without engines."""

import asyncio
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import AgentError
from onpolicy.rollout.episode_jobs import FreeJob
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.results import learnt_once
from onpolicy.rollout.rollouter import Episode, Rollouter, SingleTurn
from onpolicy.trajectory import FinishReason, Span
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.episodes import Part, asked_for, drive
from tests.support.samples import make_completion

END, GIVEN, LONGEST = 1, [90, 91], 12
PROMPT = Prompt(index=0, prompt_ids=[7, 8], label="", text="")


class Asks(Rollouter):
    """Gives two tokens after every answer that ended by itself, three times at most."""

    async def roll_out(self, prompt, turns):
        for _ in range(3):
            answer = await turns.sample()
            if not turns.num_left:
                break
            assert answer.finish_reason == FinishReason.STOP
            await asyncio.sleep(0)
            turns.append(GIVEN)
        return Episode()


def open_episode(rollouter, longest=LONGEST):
    params = SamplingParams(temperature=0.5, max_new_tokens=longest, stop_token_ids=(END,))
    return OpenEpisode(
        rollouter, PROMPT, Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=params)
    )


def answer(request, version=0):
    """Token t is decided by the seed and its absolute position alone, as the engines' sampler does."""
    ids = []
    while len(ids) < request.params.max_new_tokens:
        position = len(request.prompt_ids) + len(ids)
        ids.append(random.Random(request.sampling_seed * 1000 + position).choice([END, 5, 6]))
        if ids[-1] == END:
            break
    reason = FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH
    return make_completion(ids, [-1.0] * len(ids), finish_reason=reason, weight_version=version)


def drawn(rollouter, most, longest=LONGEST):
    """An episode that is interrupted after every so many tokens, and how many each part drew."""
    episode, counts = open_episode(rollouter, longest), []
    while not episode.is_complete:
        job = Part([episode], most, 0)
        drive(job, answer)
        counts.append(job.num_tokens)
    return episode.trajectories, counts


def test_one_turn_is_a_prompt_and_its_answer():
    (trajectory,), _ = drawn(SingleTurn(), None)
    assert trajectory.prompt_ids == PROMPT.prompt_ids
    assert {*trajectory.temperatures} == {0.5}
    request = open_episode(SingleTurn()).turns.request
    assert trajectory.response_ids == answer(request).response_ids


def test_what_is_given_stands_between_what_is_sampled():
    (trajectory,), counts = drawn(Asks(), None)
    assert len(counts) == 1, "all turns of an episode are of one job"
    turns = "".join("s" if sampled else "g" for sampled in trajectory.sampled)
    assert turns.startswith("gg") and "sggs" in turns
    given = [t for t, s in zip(trajectory.token_ids, trajectory.sampled, strict=True) if not s]
    assert given == PROMPT.prompt_ids + GIVEN * (len(given) // 2 - 1)
    assert trajectory.num_sampled == sum(counts) <= LONGEST


def test_an_episode_that_has_sampled_its_longest_response_is_asked_for_no_more():
    (trajectory,), _ = drawn(Asks(), None, longest=2)
    assert trajectory.num_sampled <= 2


class Waits(Asks):
    """Waits for what is no answer of the policy."""

    async def roll_out(self, prompt, turns):
        await asyncio.sleep(0.01)
        await asyncio.create_subprocess_exec("true")
        return await super().roll_out(prompt, turns)


def test_the_times_of_answers_follow_each_other_and_go_on_after_a_resume():
    episode, done = open_episode(Asks()), 0
    while not done:  # up to the first complete answer
        drive(Part([episode], 1, 0), answer)
        (so_far,) = episode.record()
        done = len(so_far.times)
    before = dataclasses.replace(
        so_far, times=tuple((end, a + 50, b + 50) for end, a, b in so_far.times)
    )
    again = open_episode(Asks())
    again.resume([before])
    drive(Part([again], None, 0), answer)
    (whole,) = again.trajectories
    moments = [moment for _, *both in whole.times for moment in both]
    assert len(whole.times) == len(whole.answers) > done
    assert whole.times[:done] == before.times and moments == sorted(moments)
    assert whole.until(before.answers[-1][0]).times == before.times
    assert whole.forked(whole.answers[0][0], "0").times == whole.times[:1]


def test_a_rollouter_may_wait_for_anything():
    assert drawn(Waits(), None) == drawn(Asks(), None)


def test_an_episode_whose_failure_ends_the_run_is_resumed_as_if_it_had_not_failed():
    """As by a checkpoint that is written while the run has not ended yet."""

    class Fails(Asks):
        async def roll_out(self, prompt, turns):
            await turns.sample()
            raise LookupError("its worker process ended")

    whole, _ = drawn(Asks(), None)
    before, after = open_episode(Fails()), open_episode(Asks())
    with pytest.raises(AgentError, match="its worker process ended"):
        drive(Part([before], None, 0), answer)
    after.resume(before.record(), before.failures)
    drive(Part([after], None, 0), answer)
    assert after.trajectories == whole


def test_a_rollouter_that_gives_other_tokens_when_it_is_resumed_is_refused():
    before, after = open_episode(Asks()), open_episode(Asks())
    drive(Part([before], None, 0), answer)
    (record,) = before.record()
    other = list(record.token_ids)
    other[record.answers[0][0]] += 1
    after.resume([dataclasses.replace(record, token_ids=other)])
    with pytest.raises(ValueError, match="gives other tokens than before after token"):
        drive(Part([after], None, 0), answer)


def test_a_policy_that_has_stopped_is_to_be_given_something_first():
    class Twice(Rollouter):
        async def roll_out(self, prompt, turns):
            await turns.sample()
            await turns.sample()
            return Episode()

    with pytest.raises(AgentError, match=r"prompt 0, sample 0: .*give it tokens before"):
        drawn(Twice(), None)


END_OF_BRANCH, LONGEST_BRANCH = 1, 14
PARAMS = SamplingParams(
    temperature=0.5, max_new_tokens=LONGEST_BRANCH, stop_token_ids=(END_OF_BRANCH,)
)

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


def open_branches(program):
    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    return OpenEpisode(Runs(program), PROMPT, request)


def branch_answer(request, most=LONGEST_BRANCH):
    """A token is decided by the seed and all tokens before it, as the engines' are."""
    ids = []
    while len(ids) < min(request.params.max_new_tokens, most):
        key = (request.sampling_seed, request.params.temperature, *request.prompt_ids, *ids)
        ids.append(random.Random(str(key)).choice([END_OF_BRANCH, 5, 6]))
        if ids[-1] == END_OF_BRANCH:
            break
    reason = FinishReason.STOP if ids[-1:] == [END_OF_BRANCH] else FinishReason.LENGTH
    spans = (Span(version=0, start=0, end=len(ids)),) if ids else ()
    return make_completion(ids, [-0.5 * x for x in ids], finish_reason=reason, spans=spans)


def whole(program):
    episode = open_branches(program)
    job = Part([episode], None, 0)
    drive(job, branch_answer)
    return episode, job.num_tokens


@given(programs, st.integers(1, 5), st.integers(0, 99).map(random.Random))
def test_neither_the_order_of_arrivals_nor_interruptions_change_a_branch(program, most, chance):
    expected, num_tokens = whole(program)
    episode, drawn = open_branches(program), 0
    while not episode.is_complete:
        job = Part([episode], most, 0)
        for _ in asked_for(job):
            number = chance.choice(job.missing)
            job.add(number, branch_answer(job.requests[number]))
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
    before, after = open_branches(program), open_branches(program)
    job = FreeJob(0, lambda episode: None)
    job.begin([before])
    for _, number in zip(range(count), asked_for(job), strict=False):
        job.add(number, branch_answer(job.requests[number]))
    job.interrupt()
    for number in job.missing:
        begun = branch_answer(job.requests[number], part)
        if begun.finish_reason != FinishReason.STOP:
            begun = dataclasses.replace(begun, finish_reason=FinishReason.ABORT)
        job.add(number, begun)
    after.resume(before.record())
    before.end()
    drive(Part([after], None, 0), branch_answer)
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
    drive(Part([cut, uncut], None, 0), branch_answer)
    assert cut.trajectories == uncut.trajectories and len(cut.record()[0].answers) > 1


def test_forks_of_the_same_tokens_sample_others_and_by_their_keys_the_same():
    class Forks(Rollouter):
        async def roll_out(self, prompt, turns):
            one, two = turns.fork(key="a"), turns.fork(key="b")
            await asyncio.gather(one.sample(), two.sample())
            return Episode(trajectories=[two, one])

    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    episode = OpenEpisode(Forks(), PROMPT, request)
    drive(Part([episode], None, 0), branch_answer)
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
        drive(Part([OpenEpisode(Twice(), PROMPT, request)], None, 0), branch_answer)
    assert ended.value.reason == "result"


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"token_ids": [*t.token_ids[:-1], t.token_ids[-1] + 1]},  # tokenised again
        lambda t: {"sampled": [*t.sampled[1:], t.sampled[0]]},  # a mask that is shifted by one
        lambda t: {"rollout_log_probs": np.nextafter(t.rollout_log_probs, np.float32(0))},
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
        drive(Part([OpenEpisode(MakesUp(), PROMPT, request)], None, 0), branch_answer)


def test_tokens_that_are_equal_by_chance_are_learnt_in_both():
    (trajectory,) = whole([])[0].trajectories
    one = dataclasses.replace(trajectory, forks=(("0", 2),))
    other = dataclasses.replace(trajectory, forks=(("1", 2),))
    assert learnt_once([one, other]) == [one, other]
