"""Runs whose episodes branch and say their rewards: what is asked, learnt and logged."""

from statistics import fmean

import pytest

from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.run.run import Run
from tests.support.engines_in_memory import Host
from tests.support.run_in_memory import (
    Interrupted,
    even_tokens,
    interrupted_at,
    records_of,
    run_in_memory,
)

pytestmark = pytest.mark.usefixtures("one_process")

GIVEN = [[9, 3], [9, 4]]
MODES = {
    "lag 0": {},
    "lag 1": {"rollout_lag": 1},
    "dynamic": {"dynamic_sampling": True, "over_sampling_batch_size": 2},
    "steps": {"global_batch_size": 4},
}


class Branches(Rollouter):
    """Goes on twice from the first answer. Prompts with an even number have a reward of their own."""

    async def roll_out(self, prompt, turns):
        await turns.sample(max_tokens=4)
        branches = [turns, turns.fork()]
        for branch, given in zip(branches, GIVEN, strict=True):
            branch.append(given)
            await branch.sample()
        sampled = [sum(branch.trajectory.response_ids) % 3 for branch in branches]
        rewards = [float(x) for x in sampled] if prompt.index % 2 == 0 else None
        return Episode(rewards=rewards, metrics={"num_calls": prompt.index}, info={"of": sampled})


class Keeps(Run):
    def __init__(self, *args, **more):
        super().__init__(*args, rollouter=Branches(), **more)
        self.groups = []
        Keeps.last = self

    def train(self, groups, step):
        self.groups += groups
        return super().train(groups, step)


def run(directory, engines=1, make_run=Keeps, reward=even_tokens, **more):
    values = {"rollout_max_response_len": 12, "rollout_num_engines": engines, **more}
    return run_in_memory(directory, Host(), reward, make_run=make_run, **values)


def test_a_group_has_its_episodes_and_every_sampled_token_is_learnt_once(tmp_path):
    asked = []

    def reward(sample):
        asked.append(sample)
        return even_tokens(sample)

    ran = run(tmp_path, reward=reward, eval_sets={})
    groups = Keeps.last.groups
    assert all([len(e) for e in group.episodes] == [2] * 4 for group in groups)
    learnt = 0
    for first, second in (episode for group in groups for episode in group.episodes):
        assert first.sample_index == second.sample_index
        shared = first.trajectory.sampled.index(False, len(first.prompt.prompt_ids))
        assert first.token_ids[:shared] == second.token_ids[:shared]
        assert not any(second.trajectory.sampled[:shared])
        assert second.token_ids[shared : shared + 2] == GIVEN[1]
        learnt += len(first.response_ids) + len(second.response_ids)
        assert first.info == second.info and first.metrics == {"num_calls": first.prompt.index}
        if first.is_rewarded:
            assert [first.reward, second.reward] == [float(x) for x in first.info["of"]]
    assert ran.totals.num_compared_tokens == learnt
    # The reward function was asked for the others, and for no other.
    assert {s.prompt.index % 2 for s in asked} == {1}
    assert len(asked) == sum(not s.is_rewarded for group in groups for s in group.samples) > 0
    for record in records_of(tmp_path):
        assert record["episodes/num_trajectories"] == 2.0
        assert record["episodes/num_turns"] == 3.0
        assert 0 <= record["episodes/num_rewarded"] <= 12 and "episodes/num_calls" in record


@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_branches_that_is_resumed_goes_on_to_the_same_hash(tmp_path, mode):
    whole, save = run(tmp_path / "whole", **MODES[mode]), str(tmp_path / "save")
    expected = [(s.reward, s.info, s.metrics) for g in Keeps.last.groups for s in g.samples]
    values = {"save": save, "load": save, "save_interval": 1, **MODES[mode]}
    with pytest.raises(Interrupted):
        run(tmp_path / "part", make_run=interrupted_at(2, Keeps), **values)
    kept = Keeps.last.groups
    assert run(tmp_path / "part", **values).run_hash == whole.run_hash
    found = [(s.reward, s.info, s.metrics) for g in kept + Keeps.last.groups for s in g.samples]
    assert found == expected


class Loses(Run):
    """Episodes and whole groups are missing in what is trained on."""

    def __init__(self, *args, **more):
        super().__init__(*args, rollouter=Branches(), **more)
        self.steps = []
        Loses.last = self

    def roll_out(self, step):
        groups, metrics = super().roll_out(step)
        groups[0].samples = []
        groups[1].samples = groups[1].episodes[1]
        return groups, metrics

    def train(self, groups, step):
        train = self.engines.trainer.train

        def keep(samples, step, rates):
            self.steps.append((step, len({s.episode for s in samples}), len(samples), len(rates)))
            return train(samples, step, rates)

        self.engines.trainer.train = keep
        try:
            return super().train(groups, step)
        finally:
            del self.engines.trainer.train


def test_what_failed_is_missing_and_the_run_goes_on(tmp_path):
    ran = run(tmp_path, make_run=Loses, global_batch_size=2)
    assert ran.rollouts == 4
    # 5 episodes of 2 trajectories are left, of 12; and the 6 steps of 2 episodes each are 5.
    assert Loses.last.steps == [(step, 5, 10, 5) for step in range(4)]
    filtered = [record["rollout/num_filtered_groups"] for record in records_of(tmp_path)]
    assert filtered == [1.0] * 4


class Fails(Branches):
    """On one prompt always, and on others by chance."""

    async def roll_out(self, prompt, turns):
        found = await super().roll_out(prompt, turns)
        if prompt.index == 1 or sum(turns.trajectory.response_ids) % 3 == 0:
            raise RuntimeError("no luck")
        return found


class KeepsWhatIsLeft(Keeps):
    def __init__(self, *args, **more):
        Run.__init__(self, *args, rollouter=Fails(), **more)
        self.groups = []
        Keeps.last = self


def test_a_failed_episode_is_dropped_and_no_reward_of_0(tmp_path):
    values = {"make_run": KeepsWhatIsLeft, "episode_failures": "drop", "eval_sets": {}}
    ran = run(tmp_path / "one", **values)
    groups, records = Keeps.last.groups, records_of(tmp_path / "one")
    left = [len(group.episodes) for group in groups]
    assert {group.prompt.index for group in groups if not group.samples} == {1}
    assert any(0 < count < 4 for count in left)
    failed = sum(record["rollout/num_failed_episodes"] for record in records)
    assert failed == 4 * len(groups) - sum(left) > 0
    assert sum(record["episodes/num_empty_groups"] for record in records) == left.count(0)
    for step, record in enumerate(records):
        drawn = groups[3 * step : 3 * step + 3]
        rewards = [reward for group in drawn for reward in group.rewards]
        assert record["rollout/raw_reward"] == fmean(rewards)
    assert run(tmp_path / "three", engines=3, **values).run_hash == ran.run_hash
