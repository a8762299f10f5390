"""Runs whose episodes have several turns have one hash, and learn nothing of what was given."""

import numpy as np
import pytest

from onpolicy.errors import ParityError
from onpolicy.rollout.rollouter import Episode, Rollouter
from tests.onpolicy.run.test_drawing import FREE, journal_of
from tests.support.engines_in_memory import Engine, Host
from tests.support.kept_runs import Keeps, require_weights_of_spans
from tests.support.run_in_memory import even_tokens, run_in_memory

pytestmark = pytest.mark.usefixtures("one_process")

GIVEN = [9, 3]
MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
    "dynamic": {"dynamic_sampling": True, "over_sampling_batch_size": 2},
}


class TwoTurns(Rollouter):
    """Has the policy go on once after it has stopped, and pays for a group's place."""

    async def roll_out(self, prompt, turns):
        await turns.sample()
        turns.append(GIVEN)
        await turns.sample()
        return Episode()

    def finish_group(self, group):
        for sample in group.samples:
            sample.reward += sample.prompt.index


def takes_turns(*args, **more):
    return Keeps(*args, rollouter=TwoTurns(), **more)


def run(directory, engines=1, host=None, make_run=takes_turns, **more):
    values = {"rollout_max_response_len": 12, "rollout_num_engines": engines, **more}
    return run_in_memory(directory, host or Host(), even_tokens, make_run=make_run, **values)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_turns_has_one_hash_on_any_number_of_engines(tmp_path, mode):
    ran = run(tmp_path / "one", **MODES[mode])
    kept = Keeps.last
    assert any(_goes_on(sample) for sample in kept.samples)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
    assert run(tmp_path / "three", engines=3, **MODES[mode]).run_hash == ran.run_hash


def _goes_on(sample):
    sampled = sample.trajectory.sampled
    return sampled[-1] and False in sampled[sampled.index(True) :]


def test_every_sampled_token_is_of_the_weights_that_its_span_says_in_every_turn(tmp_path):
    run(tmp_path, rollout_lag=1)
    require_weights_of_spans(Keeps.last)
    for sample in Keeps.last.samples:
        trajectory, sampled = sample.trajectory, sample.trajectory.sampled
        given = [t for t, s in zip(trajectory.token_ids, sampled, strict=True) if not s]
        assert given in (sample.prompt.prompt_ids, sample.prompt.prompt_ids + GIVEN)


def test_a_free_run_of_turns_is_repeated_from_its_journal(tmp_path):
    values = {**FREE, "max_staleness": 2, "eval_sets": {}}
    ran = run(tmp_path / "ran", engines=2, **values)
    replay = str(journal_of(tmp_path / "ran"))
    assert run(tmp_path / "again", replay=replay, **values).run_hash == ran.run_hash


def test_one_bit_in_a_later_turn_ends_the_run(tmp_path):
    class Off(Engine):
        async def generate(self, session, request, takes_parts=False):
            answer = await super().generate(session, request, takes_parts)
            if request.prompt_ids[-2:] == GIVEN:
                last = answer.rollout_log_probs.array[-1:]
                np.nextafter(last, np.float32(0), out=last)
            return answer

    class OffHost(Host):
        def new_engine(self, spec, port, log_file):
            return Off(spec, port, log_file)

    with pytest.raises(ParityError, match=r"^[1-9]\d* of \d+ tokens have another log-probability"):
        run(tmp_path, host=OffHost())


def test_a_group_is_seen_with_its_rewards_before_they_are_final(tmp_path):
    run(tmp_path)
    assert all(s.reward == even_tokens(s) + s.prompt.index for s in Keeps.last.samples)
