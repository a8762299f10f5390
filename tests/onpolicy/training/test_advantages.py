"""Advantages are made where the scores are: whatever an estimator reads, on any number of ranks."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from onpolicy.algorithm.catalogue import ESTIMATORS
from onpolicy.algorithm.estimators import group_advantages
from onpolicy.config import TrainConfig, groups
from onpolicy.ops.log_probs import Scores
from onpolicy.training import distributed
from onpolicy.training.advantages import (
    Estimator,
    Penalties,
    RewardEstimator,
    after,
    scored_trajectories,
    token_advantages,
)
from onpolicy.training.batch import packed_batch
from onpolicy.training.shares import Outcomes, make_shares
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, make_samples, weights
from tests.support.onpolicy_batches import make_micro_batches
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample, with_trajectory
from tests.support.tiny import make_checkpoint

PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())
GROUPS = [[0.1, 0.3, 1.7, -0.45], [2.5], [0.1, 0.1, 0.1], [1.0, 0.0, 0.7]]
LENGTHS = [[3, 1, 4, 2], [5], [2, 2, 1], [1, 6, 2]]

KINDS = sorted({*ESTIMATORS} - {"gae", "otb"})


def grouped_samples():
    pairs = [
        (group, reward, length)
        for group, (rewards, lengths) in enumerate(zip(GROUPS, LENGTHS, strict=True))
        for reward, length in zip(rewards, lengths, strict=True)
    ]
    return [
        dataclasses.replace(
            make_train_sample(range(1 + n), 1, [-0.5 * i] * n, reward, i), group=group
        )
        for i, (group, reward, n) in enumerate(pairs)
    ]


def made_on(
    num_ranks, estimator, scores_of=lambda batch: {}, samples_of=grouped_samples, paid=None
):
    """The advantages of every sample, [R] of each, that any rank has made; paid: penalties by number."""

    def make_on(rank):
        samples = samples_of()
        share = make_shares(samples, 3, num_ranks, 9)[rank]
        batches = [packed_batch(part, torch.device("cpu")) for parts in share for part in parts]
        each = [scores_of(batch) for batch in batches]
        scores = {role: [found[role] for found in each] for role in each[0]}
        ours = None if paid is None else {n: paid[n] for batch in batches for n in batch.numbers}
        outcomes = after(Outcomes.of(samples, 3), ours)
        scored = scored_trajectories(batches, scores, ours)
        found = token_advantages(estimator, outcomes, batches, scored)
        return {
            number: values.tolist()
            for batch, packed in zip(batches, found, strict=True)
            if batch.numbers
            for number, values in zip(batch.numbers, packed.split(batch.response_lens), strict=True)
        }

    every = {number: x for ours in on_ranks(num_ranks, make_on) for number, x in ours.items()}
    return [every[number] for number in range(len(every))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_estimators_of_rewards_give_those_of_all_groups_on_any_number_of_ranks(kind, num_ranks):
    whole = group_advantages(GROUPS, kind, LENGTHS)
    alike = [
        torch.full((n,), a).tolist()
        for group, lengths in zip(whole, LENGTHS, strict=True)
        for a, n in zip(group, lengths, strict=True)
    ]
    assert made_on(num_ranks, RewardEstimator(kind)) == alike


TOKEN_REWARDS = {1: [0.3], 3: [-0.5, 0.05], 4: [0.1, 0.0, 0.1, 0.0, 2.3], 8: [1.0]}
"""Of the samples with these numbers; the others have one reward for all tokens."""


def token_rewarded_samples():
    """Samples 1 to 3 are trajectories of one episode."""
    forked = (with_trajectory(s, forks=((str(i), 1),)) for i, s in enumerate(grouped_samples()))
    return [
        dataclasses.replace(
            s,
            episode=1 if i in (2, 3) else i,
            token_rewards=TOKEN_REWARDS.get(i),
        )
        for i, s in enumerate(forked)
    ]


def returns_by_hand():
    rewards = [reward for group in GROUPS for reward in group]
    lengths = [n for group in LENGTHS for n in group]
    alike = [[reward] * n for reward, n in zip(rewards, lengths, strict=True)]
    returns = {i: [sum(x[t:]) for t in range(len(x))] for i, x in TOKEN_REWARDS.items()}
    return [returns.get(i, each) for i, each in enumerate(alike)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_token_with_rewards_from_it_on_is_learnt_by_them_on_any_number_of_ranks(num_ranks):
    found = made_on(num_ranks, RewardEstimator("reinforce"), samples_of=token_rewarded_samples)
    assert found == [pytest.approx(each) for each in returns_by_hand()]
    kind = RewardEstimator("reinforce_plus_plus")
    whitened = made_on(num_ranks, kind, samples_of=token_rewarded_samples)
    tokens = torch.tensor([a for each in returns_by_hand() for a in each]).double()
    expected = ((tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()).tolist()
    assert [a for each in whitened for a in each] == pytest.approx(expected, rel=1e-5)
    assert whitened == made_on(1, kind, samples_of=token_rewarded_samples)


@pytest.mark.parametrize("kind", ["reinforce", "reinforce_plus_plus"])
def test_a_reward_on_the_last_token_has_the_bits_of_one_for_all(kind):
    def on_the_last_token():
        return [
            dataclasses.replace(s, token_rewards=rewards)
            for s in grouped_samples()
            for rewards in [[0.0] * (s.trajectory.num_sampled - 1) + [s.reward]]
        ]

    estimator = RewardEstimator(kind)
    assert made_on(2, estimator, samples_of=on_the_last_token) == made_on(1, estimator)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"reinforce"}))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_estimators_of_groups_take_what_an_episode_came_to_and_count_it_once(kind, num_ranks):
    """Its trajectories have rewards of .3, 1.7 and -.45 here: on average .5166..."""
    found = made_on(num_ranks, RewardEstimator(kind), samples_of=token_rewarded_samples)
    assert found == made_on(1, RewardEstimator(kind), samples_of=token_rewarded_samples)
    if kind == "dr_grpo":
        baseline = (0.1 + (0.3 + 1.7 - 0.45) / 3) / 2
        expected = [0.1 - baseline, 0.3 - baseline, 1.7 - baseline, -0.45 - baseline]
        assert [each[0] for each in found[:4]] == pytest.approx(expected)
    assert found != made_on(num_ranks, RewardEstimator(kind))  # the control: each a sample


def peers_samples():
    pairs = zip(PEERS["rewards"]["groups"], PEERS["rewards"]["lengths"], strict=True)
    each = [(g, *x) for g, (r, n) in enumerate(pairs) for x in zip(r, n, strict=True)]
    return [
        dataclasses.replace(make_train_sample(range(1 + n), 1, [0.0] * n, r, i), group=g)
        for i, (g, r, n) in enumerate(each)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_what_tokens_pay_is_part_of_their_returns_as_in_verl(num_ranks):
    """REINFORCE++ with a KL in the reward and a discount, by verl's own function."""
    verl = PEERS["reinforce_plus_plus_by_token"]
    paid = {i: [verl["kl_coef"] * x for x in kl] for i, kl in enumerate(verl["kl"])}
    estimator = RewardEstimator("reinforce_plus_plus", gamma=verl["gamma"])
    found = made_on(num_ranks, estimator, samples_of=peers_samples, paid=paid)
    assert found == [pytest.approx(each, abs=1e-6) for each in verl["advantages"]]
    assert found == made_on(1, estimator, samples_of=peers_samples, paid=paid)
    without = RewardEstimator("reinforce_plus_plus", gamma=1.0)
    assert found != made_on(num_ranks, without, samples_of=peers_samples, paid=paid)


@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"otb"}))  # `TokenBaseline` makes those
def test_what_tokens_pay_leaves_estimators_of_groups_the_rest_of_the_reward(kind):
    """As if rewards had been smaller by what a trajectory paid; none where every token pays nothing."""
    paid = {i: [0.01 * i] * n for i, n in enumerate(n for group in LENGTHS for n in group)}
    nothing = {i: [0.0] * len(each) for i, each in paid.items()}
    estimator = RewardEstimator(kind)
    assert made_on(2, estimator, paid=nothing) == made_on(1, estimator)
    found = made_on(2, estimator, paid=paid)
    assert found == made_on(1, estimator, paid=paid) != made_on(1, estimator)

    def smaller():
        return [
            dataclasses.replace(s, reward=s.reward - sum(paid[i]))
            for i, s in enumerate(grouped_samples())
        ]

    if not ESTIMATORS[kind].returns:
        expected = made_on(1, estimator, samples_of=smaller)
        assert found == [pytest.approx(each, abs=1e-6) for each in expected]


class KlInReward(Estimator):
    """What PPO for language models takes: a token's KL towards the reference is part of its reward, and
    the returns are whitened over the tokens of the whole rollout."""

    roles = frozenset({"policy", "reference"})

    def advantages(self, outcomes, ours):
        rewards = [reward for group in outcomes.rewards for reward in group]
        returns = {number: self.returns(rewards[number], ours[number]) for number in ours}
        everyones = distributed.gather_by_number({n: x.tolist() for n, x in returns.items()})
        assert list(everyones) == list(range(outcomes.num_samples))
        tokens = [x for values in everyones.values() for x in values]
        mean = math.fsum(tokens) / len(tokens)
        scale = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / len(tokens))
        return {number: ((x - mean) / scale).float() for number, x in returns.items()}

    def returns(self, reward, scored):
        """float64 [R]: the reward, less what of the KL comes at a token or after it."""
        policy, reference = (scored.scores[role].log_probs.double() for role in sorted(self.roles))
        return reward - 0.1 * (policy - reference).flip(0).cumsum(0).flip(0)


class OrderOfTheRanks(KlInReward):
    """The control: what it whitens by depends on which samples a rank has."""

    def advantages(self, outcomes, ours):
        rewards = [reward for group in outcomes.rewards for reward in group]
        returns = {number: self.returns(rewards[number], ours[number]) for number in ours}
        mean = math.fsum(x for values in returns.values() for x in values.tolist()) / len(returns)
        return {number: (x - mean).float() for number, x in returns.items()}


def scores_by_hand(batch):
    """Of the policy what the rollout had, of the reference half of that."""
    log_probs = batch.rollout_log_probs
    others = [torch.zeros_like(log_probs)] * 3
    return {"policy": Scores(log_probs, *others), "reference": Scores(log_probs / 2, *others)}


def test_an_estimator_gets_each_tokens_scores_by_role():
    alone = made_on(1, KlInReward(), scores_by_hand)
    assert [made_on(n, KlInReward(), scores_by_hand) for n in (2, 3)] == [alone, alone]
    # Sample 9 has reward 0, and 6 tokens of -4.5 and -2.25: returns of 0.225 times 6, 5, ... 1.
    steps = torch.tensor(alone[9]).diff()
    assert torch.allclose(steps, steps[:1].expand(5)) and steps[0] < 0
    assert made_on(2, OrderOfTheRanks(), scores_by_hand) != made_on(
        1, OrderOfTheRanks(), scores_by_hand
    )


def test_an_estimator_gives_each_sample_float32_of_its_own_tokens():
    class Double(Estimator):
        def advantages(self, outcomes, ours):
            return {number: torch.zeros(1, dtype=torch.float64) for number in ours}

    with pytest.raises(ValueError, match=r"Double: shape=\(1,\).*Give float32, one number a token"):
        distributed.init_process_group()
        samples = grouped_samples()
        batches = [packed_batch(dict(enumerate(samples)), torch.device("cpu"))]
        outcomes = Outcomes.of(samples, 1)
        token_advantages(Double(), outcomes, batches, scored_trajectories(batches, {}))


# Whole trainers, whose reference is another model than their policy


def train_by(estimator, job, reference):
    """(metrics, weights) after a rollout of two optimizer steps."""
    changed = {"algorithm": {"ref_checkpoint": str(reference)}}
    trainer = make(dataclasses.replace(job, changes=changed), estimator)
    metrics = trainer.train(make_samples(trainer), 0, [1e-2, 1e-2]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, weights(trainer)


@pytest.fixture(scope="module")
def ranks():
    groups = {count: Ranks(count) for count in (1, 2)}
    yield groups
    for group in groups.values():
        group.stop()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("reference"), "qwen3", initializer_range=0.1)


def test_weights_are_the_same_on_1_and_2_ranks_by_an_estimator_that_reads_the_reference(
    ranks, checkpoint, reference, backend
):
    job = Job(path=checkpoint, backend=backend)

    def trained(count, estimator, towards=reference):
        return ranks[count].run(train_by, estimator, job, towards)[0]

    metrics, alone = trained(1, KlInReward())
    found, weights_of_two = trained(2, KlInReward())
    assert found == metrics and equal(weights_of_two, alone)
    assert "train/kl_loss" not in metrics  # that the reference scores adds no term to the loss
    others = [
        trained(2, OrderOfTheRanks()),  # the control
        trained(1, KlInReward(), checkpoint),  # a reference that is the policy has no KL
        trained(1, RewardEstimator("reinforce")),
    ]
    assert not any(equal(other, alone) for _, other in others)


def penalties(longest=20, **algorithm):
    return Penalties(
        TrainConfig(
            algorithm=groups.AlgorithmConfig(**algorithm),
            rollout=groups.RolloutConfig(rollout_max_response_len=longest),
        )
    )


def paid(penalties, samples, num_ranks=1):
    """What every sample pays, and metrics, after one rollout of which the reference says half."""

    def on_rank(rank):
        batches = make_micro_batches(samples, max_tokens=9, rank=rank, num_ranks=num_ranks)
        old = [batch.rollout_log_probs for batch in batches]
        found, metrics = penalties.of(batches, old, [x / 2 for x in old])
        return found, metrics

    results = on_ranks(num_ranks, on_rank)
    assert all(metrics == results[0][1] for _, metrics in results)
    return dict(sorted(pair for found, _ in results for pair in found.items())), results[0][1]


def samples(lengths):
    return [make_train_sample(range(1 + n), 1, [-0.5] * n, 1.0, i) for i, n in enumerate(lengths)]


def test_answers_that_are_too_long_pay_as_in_areal():
    case = PEERS["overlong"]
    these = penalties(overlong_buffer_len=case["buffer"], longest=case["longest"])
    found, _ = paid(these, samples(case["lengths"]))
    expected = [reward / case["factor"] for reward in case["rewards"]]
    assert [-each[-1] for each in found.values()] == pytest.approx(expected, abs=1e-6)
    assert all(not any(each[:-1]) for each in found.values())


def test_a_token_pays_its_kl_on_any_number_of_ranks():
    these, kl = penalties(kl_coef=0.2), -0.25
    found, metrics = paid(these, samples([3, 1, 5, 2]))
    assert [x for each in found.values() for x in each] == pytest.approx([0.2 * kl] * 11)
    assert metrics["train/kl_in_reward"] == pytest.approx(kl)
    for num_ranks in (2, 3):
        assert paid(these, samples([3, 1, 5, 2]), num_ranks) == (found, metrics)


def test_without_a_penalty_nobody_pays_and_nothing_is_measured():
    batches = make_micro_batches(samples([3]), max_tokens=9)
    assert penalties().of(batches, [None], [None]) == (None, {})


def test_a_masked_token_pays_nothing_whatever_stands_there():
    (batch,) = make_micro_batches(samples([2]), max_tokens=9)
    batch = dataclasses.replace(batch, mask=torch.tensor([True, False]))
    old = torch.tensor([-0.5, float("nan")])
    from onpolicy.training import distributed

    distributed.init_process_group()
    found, _ = penalties(kl_coef=1.0).of([batch], [old], [torch.tensor([-0.25, -1.0])])
    assert found == {0: [-0.25, 0.0]}
