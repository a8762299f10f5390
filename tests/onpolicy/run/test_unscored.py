"""A sample that could not be scored counts in nothing that is learnt or said of rewards.

After reports of others: trl#5902 (a reward of None was 0 in the group's baseline), verl#6375 (a rejected
sample's reward moved its siblings' advantages), prime-rl#2076 (the rest of the group is trained on).
"""

import math
import shutil
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onpolicy.algorithm.catalogue import ESTIMATORS
from onpolicy.algorithm.estimators import group_advantages
from onpolicy.config import TrainConfig
from onpolicy.config.groups import AlgorithmConfig, DataConfig
from onpolicy.outputs.totals import RunHash
from onpolicy.rollout.prompt_order import Curriculum, PromptSource
from onpolicy.rollout.statistics import eval_metrics, rollout_metrics
from onpolicy.run.train_samples import has_signal, make_train_samples, worth_training
from onpolicy.training.shares import Outcomes
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.run_in_memory import even_tokens, records_of, run_in_memory, samples_of
from tests.support.samples import answered, make_completion

PROMPT = Prompt(index=0, prompt_ids=[3], label="", text="")
CONFIG = TrainConfig(algorithm=AlgorithmConfig())


def sample(place, reward, number=0, **more):
    """A trajectory of an episode; reward None: it could not be scored."""
    trajectory = answered(PROMPT, make_completion([5] * (1 + place), [-1.0] * (1 + place)))
    values = {"reward": math.nan if reward is None else reward, "has_failed": reward is None}
    given = {"prompt": PROMPT, "sample_index": place, "number": number, "trajectory": trajectory}
    return Sample(**given, **values, **more)


def group(*episodes, number=0):
    """A group of episodes, each a list of its trajectories' rewards."""
    samples = [sample(i, r, n) for i, each in enumerate(episodes) for n, r in enumerate(each)]
    return SampleGroup(prompt=PROMPT, samples=samples, number=number)


def without_unscored(each):
    """The group as if those episodes had never been begun."""
    return replace(each, samples=[*chain.from_iterable(each.scored_episodes)])


def learnt(groups):
    """What is learnt from, with the rewards that it is learnt by."""
    samples = make_train_samples(worth_training(groups, CONFIG))
    return [(s.group, s.episode, s) for s in samples], Outcomes.of(samples, 1)


rewards = st.none() | st.integers(-2, 2).map(float)
episodes = st.lists(rewards, min_size=1, max_size=3)
groups_of = st.lists(st.lists(episodes, min_size=1, max_size=5), min_size=1, max_size=4)


@given(groups_of, st.sampled_from(sorted({*ESTIMATORS} - {"gae", "otb"})))
def test_the_others_are_learnt_from_as_if_it_had_never_been_sampled(made, estimator):
    groups = [group(*each, number=i) for i, each in enumerate(made)]
    clean = [without_unscored(each) for each in groups]
    assert learnt(groups) == learnt(clean)
    _, outcomes = learnt(groups)
    given = outcomes.rewards, estimator, outcomes.lengths, outcomes.episodes
    assert all(math.isfinite(a) for a in chain.from_iterable(group_advantages(*given)))
    assert [has_signal(each) for each in groups] == [has_signal(each) for each in clean]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=6))
def test_a_reward_of_0_in_its_place_would_move_the_others(rewards):
    """The control of the test above: what was done before."""
    assume(sum(rewards))
    scored = group_advantages([[float(r) for r in rewards]], "dr_grpo")[0]
    with_0 = group_advantages([[0.0, *map(float, rewards)]], "dr_grpo")[0]
    assert with_0[1:] != scored


def test_one_that_is_left_alone_has_nothing_to_be_compared_with():
    alone, nothing = group([1.0], [None]), group([None], [None, 1.0])
    assert worth_training([alone, nothing], CONFIG) == [alone]
    assert not has_signal(alone) and not has_signal(nothing)
    _, outcomes = learnt([alone, nothing])
    for name, entry in ESTIMATORS.items():
        if name != "gae":
            given = outcomes.rewards, name, outcomes.lengths, outcomes.episodes
            expected = 1.0 if entry.baseline == "none" and not entry.whitens else 0.0
            assert group_advantages(*given) == [[expected]]


def test_metrics_of_rewards_leave_it_out_and_lengths_do_not():
    metrics = rollout_metrics([group([1.0], [None], [0.0]), group([None])])
    assert (metrics["rollout/raw_reward"], metrics["rollout/reward_std"]) == (0.5, 0.5)
    assert metrics["rollout/response_length"] == 7 / 4
    nothing = rollout_metrics([group([None])])
    assert "rollout/raw_reward" not in nothing
    assert nothing["rollout/response_length"] == 1.0


def test_an_evaluation_counts_it_and_leaves_it_out_of_its_means():
    scored = [group([1.0], [0.0]), group([0.0], [0.0])]
    assert "eval/num_unscored" not in eval_metrics(scored, 2)
    metrics = eval_metrics([*scored, group([1.0], [None]), group([None], [None])], 2)
    assert metrics["eval/num_unscored"] == 3.0
    assert metrics["eval/avg@2"] == 2 / 5
    assert metrics["eval/pass@1"] == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert metrics["eval/pass@2"] == 1 / 2  # of the prompts with two scored episodes
    nothing = eval_metrics([group([None])], 1)
    assert not any("@" in name for name in nothing) and nothing["eval/response_length"] == 1.0


def test_pass_rates_of_prompts_leave_it_out():
    source = PromptSource([PROMPT], seed=0, shuffle=False)
    curriculum = Curriculum(source, DataConfig(curriculum="failures"))
    curriculum.measure([group([1.0], [None], [0.0]), group([None])])
    assert curriculum.state.measured == [(0, 0, 0.5)]


def test_the_hash_of_a_run_tells_it_from_a_reward_of_0():
    hashes = set()
    for reward in (None, 0.0, 1.0):
        run_hash = RunHash()
        run_hash.add_step([group([reward])], 0.0, "")
        hashes.add(run_hash.value)
    assert len(hashes) == 3


class Unscored(list):
    """A reward that fails on every seventh sample which it is asked about."""

    def __call__(self, sample):
        self.append(sample)
        return None if len(self) % 7 == 0 else even_tokens(sample)


@pytest.mark.usefixtures("one_process")
def test_a_run_learns_from_the_others_and_says_so(tmp_path):
    asked = Unscored()
    summary = run_in_memory(tmp_path / "whole", reward=asked, log_samples=99, eval_sets={})
    records = records_of(tmp_path / "whole")
    num = [record["rollout/num_unscored"] for record in records]
    assert summary.totals.num_unscored == sum(num) == len(asked) // 7 > 0
    assert all(math.isfinite(record["train/loss"]) for record in records)
    for step in range(len(records)):
        lines = samples_of(tmp_path / "whole", f"rollout_{step:06d}")
        failed = [line for line in lines if line["reward"] is None]
        assert len(failed) == num[step]
        assert all(line["is_unscored"] and line["mismatched_tokens"] is None for line in failed)
        tokens = sum(line["num_tokens"] for line in lines if line["reward"] is not None)
        assert records[step]["parity/num_compared_tokens"] == tokens
    plain = run_in_memory(tmp_path / "plain", eval_sets={})
    assert plain.run_hash != summary.run_hash and plain.totals.num_unscored == 0


@pytest.mark.usefixtures("one_process")
def test_a_checkpoint_holds_that_what_was_drawn_ahead_could_not_be_scored(tmp_path):
    save = str(tmp_path / "save")
    given = {"eval_sets": {}, "rollout_lag": 1, "save_interval": 1, "num_rollout": 2, "save": save}
    whole = run_in_memory(tmp_path, reward=Unscored(), **given)
    shutil.rmtree(tmp_path / "save" / "step_000002")
    # What is left of the run was drawn, and is not scored again.
    resumed = run_in_memory(tmp_path, reward=lambda sample: 1 / 0, load=save, **given)
    assert (resumed.run_hash, resumed.totals) == (whole.run_hash, whole.totals)
    assert whole.totals.num_unscored > 0


@pytest.mark.usefixtures("one_process")
def test_a_rollout_of_which_nothing_could_be_scored_is_not_trained_on(tmp_path, caplog):
    summary = run_in_memory(tmp_path, reward=lambda sample: None, eval_sets={})
    assert summary.totals.num_unscored == 4 * 12
    assert not any("train/loss" in record for record in records_of(tmp_path))
    assert "rollout 3: no sample could be scored; nothing to learn from" in caplog.text
