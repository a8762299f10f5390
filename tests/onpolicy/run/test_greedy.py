"""Samples are compared with a greedy answer of the same weights, which is kept and never learnt."""

import math

import pytest

from onpolicy.outputs.run_hash import RunHash
from onpolicy.run.run import Run
from onpolicy.trajectory import UNPUSHED
from tests.support.run_in_memory import (
    ROLLOUTS,
    Interrupted,
    interrupted_at,
    records_of,
    run_in_memory,
    samples_of,
)
from tests.support.tiny_policy import score

pytestmark = pytest.mark.usefixtures("undrawn")

MODES = {
    "lag 0": {},
    "lag 2": {"rollout_lag": 2},
    "dynamic": {"dynamic_sampling": True, "n_samples_per_prompt": 1, "over_sampling_batch_size": 5},
}


class Watched(Run):
    """Keeps what is trained on, and the weights of every version."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained, self.policies = [], {}
        Watched.last = self

    def push_weights(self):
        found = super().push_weights()
        memory = self.engines.rollout.servers[0].memory
        self.policies[memory.version] = {n: w.clone() for n, w in memory.weights.items()}
        return found

    def train(self, groups, step):
        self.trained.append(groups)
        return super().train(groups, step)


def run(directory, mode, make_run=Watched, **values):
    given = {"advantage_estimator": "remax", **MODES[mode], **values}
    return run_in_memory(directory, make_run=make_run, eval_sets={}, **given)


@pytest.mark.parametrize("mode", MODES)
def test_the_answer_is_the_likeliest_of_its_groups_weights(tmp_path, mode):
    run(tmp_path, mode)
    policies = Watched.last.policies
    assert len(Watched.last.trained) == ROLLOUTS and UNPUSHED not in policies
    for group in (group for groups in Watched.last.trained for group in groups):
        answer = group.greedy
        (version,) = {span.version for s in (answer, *group.samples) for span in s.trajectory.spans}
        tokens = [*group.prompt.prompt_ids]
        for token, log_prob in zip(answer.response_ids, answer.rollout_log_probs, strict=True):
            scores = score(policies[version], tokens, 1.0, is_rounded=False)
            assert token == int(scores.argmax()) and log_prob == scores[token].item()
            tokens.append(token)
        assert answer.is_greedy and not any(s.is_greedy for s in group.samples)
        assert (
            answer.sample_index == len(group.samples) == MODES[mode].get("n_samples_per_prompt", 4)
        )
        if mode == "dynamic":
            assert group.rewards != [answer.reward]


def test_it_is_counted_shown_and_nothing_else_changes(tmp_path):
    run(tmp_path / "remax", "lag 0")
    greedy = [group.greedy.reward for group in Watched.last.trained[0]]
    drawn = [[s.response_ids for s in group.samples] for group in Watched.last.trained[0]]
    run(tmp_path / "plain", "lag 0", advantage_estimator="reinforce")
    assert [[s.response_ids for s in g.samples] for g in Watched.last.trained[0]] == drawn
    with_it, plain = records_of(tmp_path / "remax")[0], records_of(tmp_path / "plain")[0]
    assert with_it["rollout/greedy_reward"] == pytest.approx(math.fsum(greedy) / len(greedy))
    same = ("rollout/raw_reward", "rollout/response_length", "parity/num_compared_tokens")
    assert all(with_it[name] == plain[name] for name in same)
    first = samples_of(tmp_path / "remax", "rollout_000000")
    assert [s.get("is_greedy", False) for s in first[:4]] == [True, False, False, False]


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path, mode):
    straight = run(tmp_path / "straight", mode)
    saves = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1}
    with pytest.raises(Interrupted):
        run(tmp_path / "part", mode, interrupted_at(2), **saves)
    assert run(tmp_path / "part", mode, **saves).run_hash == straight.run_hash
    assert records_of(tmp_path / "part") == records_of(tmp_path / "straight")


def test_its_tokens_and_its_reward_are_part_of_the_run_hash(tmp_path):
    run(tmp_path, "lag 0")
    groups, hashes = Watched.last.trained[0], set()

    def add_hash():
        run_hash = RunHash()
        run_hash.add_step(groups, 0.0, "weights")
        hashes.add(run_hash.value)

    add_hash()
    groups[0].greedy.reward += 1
    add_hash()
    groups[1].greedy, groups[2].greedy = groups[2].greedy, groups[1].greedy
    add_hash()
    assert len(hashes) == 3
