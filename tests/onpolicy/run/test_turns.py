"""Runs whose episodes have several turns have one hash, and learn nothing of what was given."""

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.rollout.episodes import Episode, Rollouter
from onpolicy.run.run import Run
from tests.onpolicy.run.test_drawing import FREE, journal_of
from tests.support.engines_in_memory import Engine, Host
from tests.support.run_in_memory import Interrupted, even_tokens, interrupted_at, run_in_memory
from tests.support.tiny_policy import log_probs_of

pytestmark = pytest.mark.usefixtures("undrawn")

GIVEN = [9, 3]
MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
    "segments": {"rollout_segment_tokens": 2},
    "lag 1, segments": {"rollout_lag": 1, "rollout_segment_tokens": 3},
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


class Keeps(Run):
    def __init__(self, *args, **more):
        super().__init__(*args, rollouter=TwoTurns(), **more)
        self.trained, self.policies = [], []
        Keeps.last = self

    def train(self, groups, step):
        self.trained += [(step, sample) for group in groups for sample in group.samples]
        weights = self.engines.trainer.weights
        self.policies.append({name: table.clone() for name, table in weights.items()})
        return super().train(groups, step)


def run(directory, engines=1, host=None, make_run=Keeps, **more):
    values = {"rollout_max_response_len": 12, "rollout_num_engines": engines, **more}
    return run_in_memory(directory, host or Host(), even_tokens, make_run=make_run, **values)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_turns_has_one_hash_on_any_number_of_engines(tmp_path, mode):
    ran = run(tmp_path / "one", **MODES[mode])
    kept = Keeps.last
    assert any(_goes_on(sample) for _, sample in kept.trained)
    assert ran.totals.num_mismatched_tokens == 0 < ran.totals.num_compared_tokens
    assert run(tmp_path / "three", engines=3, **MODES[mode]).run_hash == ran.run_hash


def _goes_on(sample):
    sampled = sample.trajectory.sampled
    return sampled[-1] and False in sampled[sampled.index(True) :]


def test_every_sampled_token_is_of_the_weights_that_its_span_says_in_every_turn(tmp_path):
    run(tmp_path, rollout_lag=1, rollout_segment_tokens=2)
    for _, sample in Keeps.last.trained:
        trajectory, sampled = sample.trajectory, sample.trajectory.sampled
        given = [t for t, s in zip(trajectory.token_ids, sampled, strict=True) if not s]
        assert given in (sample.prompt.prompt_ids, sample.prompt.prompt_ids + GIVEN)
        assert trajectory.spans[-1].end == trajectory.num_sampled
        for span in trajectory.spans:
            policy = Keeps.last.policies[int(span.version)]
            tokens = trajectory.token_ids
            scores = log_probs_of(policy, tokens[:1], tokens[1:], 1.0).tolist()
            ours = [x for x, s in zip(scores, sampled[1:], strict=True) if s]
            assert (
                trajectory.rollout_log_probs[span.start : span.end] == ours[span.start : span.end]
            )


def test_a_free_run_of_turns_is_repeated_from_its_journal(tmp_path):
    values = {**FREE, "max_staleness": 2, "eval_sets": {}}
    ran = run(tmp_path / "ran", engines=2, **values)
    replay = str(journal_of(tmp_path / "ran"))
    assert run(tmp_path / "again", replay=replay, **values).run_hash == ran.run_hash


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_turns_that_is_resumed_goes_on_to_the_same_hash(tmp_path, mode):
    whole, save = run(tmp_path / "whole", **MODES[mode]), str(tmp_path / "save")
    values = {"save": save, "load": save, "save_interval": 1, **MODES[mode]}
    with pytest.raises(Interrupted):
        run(tmp_path / "part", make_run=interrupted_at(2, Keeps), **values)
    assert run(tmp_path / "part", **values).run_hash == whole.run_hash


def test_one_bit_in_a_later_turn_ends_the_run(tmp_path):
    class Off(Engine):
        async def generate(self, session, request, takes_parts=False):
            answer = await super().generate(session, request, takes_parts)
            if request.prompt_ids[-2:] == GIVEN:
                last = torch.tensor(answer.rollout_log_probs[-1])
                answer.rollout_log_probs[-1] = torch.nextafter(last, torch.tensor(0.0)).item()
            return answer

    class OffHost(Host):
        def new_engine(self, spec, port, log_file):
            return Off(spec, port, log_file)

    with pytest.raises(ParityError, match=r"^[1-9]\d* of \d+ tokens have another log-probability"):
        run(tmp_path, host=OffHost())


def test_a_group_is_seen_with_its_rewards_before_they_are_final(tmp_path):
    run(tmp_path)
    assert all(s.reward == even_tokens(s) + s.prompt.index for _, s in Keeps.last.trained)
