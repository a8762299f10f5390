"""Advantages are made where the scores are: whatever an estimator reads, on any number of ranks."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from onpolicy.algorithm.registry import ESTIMATORS
from onpolicy.errors import TrainingError
from onpolicy.ops.log_probs import Scores
from onpolicy.train import distributed
from onpolicy.train.advantages import Estimator, RewardEstimator, token_advantages
from onpolicy.train.batch import packed_batch
from onpolicy.train.shares import Outcomes, make_shares
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, make_samples, weights
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample, with_trajectory
from tests.support.tiny import make_checkpoint

PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())
GROUPS = [[0.1, 0.3, 1.7, -0.45], [2.5], [0.1, 0.1, 0.1], [1.0, 0.0, 0.7]]
LENGTHS = [[3, 1, 4, 2], [5], [2, 2, 1], [1, 6, 2]]

IN_THE_CONTROLLER = {
    "grpo": [
        -0.34151607751846313, -0.12294579297304153, 1.4070463180541992, -0.9425843954086304, 0.0,
        0.0, 0.0, 0.0, 0.8444390892982483, -1.1042665243148804, 0.2598274052143097,
    ],
    "dr_grpo": [
        -0.3125, -0.11249999701976776, 1.287500023841858, -0.862500011920929, 0.0, 0.0, 0.0, 0.0,
        0.4333333373069763, -0.5666666626930237, 0.13333334028720856,
    ],
    "rloo": [
        -0.4166666567325592, -0.15000000596046448, 1.7166666984558105, -1.149999976158142, 0.0,
        0.0, 0.0, 0.0, 0.6499999761581421, -0.8500000238418579, 0.20000000298023224,
    ],
    "reinforce": [
        0.10000000149011612, 0.30000001192092896, 1.7000000476837158, -0.44999998807907104, 2.5,
        0.10000000149011612, 0.10000000149011612, 0.10000000149011612, 1.0, 0.0, 0.699999988079071,
    ],
    "reinforce_plus_plus": [
        -0.645709216594696, -0.4485979676246643, 0.9311806559562683, -1.187765121459961,
        1.7196255922317505, -0.645709216594696, -0.645709216594696, -0.645709216594696,
        0.2412913292646408, -0.7442647814750671, -0.05437551066279411,
    ],
    "reinforce_plus_plus_baseline": [
        -0.49036794900894165, -0.16485904157161713, 2.1137032508850098, -1.3855174779891968,
        0.01823972351849079, 0.01823972351849079, 0.01823972351849079, 0.01823972351849079,
        0.7235090136528015, -0.9040355086326599, 0.23524565994739532,
    ],
}  # fmt: skip
"""float32 of each sample's tokens, as the controller made them before any model scored."""


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
        share = make_shares(samples_of(), 3, num_ranks, 9)[rank]
        batches = [
            packed_batch(part, torch.device("cpu"))
            for step in range(3)
            for part in share.micro_batches(step)
        ]
        each = [scores_of(batch) for batch in batches]
        scores = {role: [found[role] for found in each] for role in each[0]}
        ours = None if paid is None else {n: paid[n] for batch in batches for n in batch.numbers}
        found = token_advantages(estimator, share.outcomes, batches, scores, ours)
        return {
            number: values.tolist()
            for batch, packed in zip(batches, found, strict=True)
            if batch.numbers
            for number, values in zip(batch.numbers, packed.split(batch.response_lens), strict=True)
        }

    every = {number: x for ours in on_ranks(num_ranks, make_on) for number, x in ours.items()}
    return [every[number] for number in range(len(every))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", IN_THE_CONTROLLER)
def test_estimators_of_rewards_give_what_the_controller_gave_on_any_number_of_ranks(
    kind, num_ranks
):
    lengths = [n for group in LENGTHS for n in group]
    expected = [[a] * n for a, n in zip(IN_THE_CONTROLLER[kind], lengths, strict=True)]
    assert made_on(num_ranks, RewardEstimator(kind)) == expected


TOKEN_REWARDS = {1: [0.3], 3: [-0.5, 0.05], 4: [0.1, 0.0, 0.1, 0.0, 2.3], 8: [1.0]}
"""Of the samples with these numbers; the others have one reward for all tokens."""


def token_rewarded_samples():
    """Samples 1 to 3 are trajectories of one episode."""
    forked = (with_trajectory(s, forks=((str(i), 1),)) for i, s in enumerate(grouped_samples()))
    return [
        dataclasses.replace(
            s,
            episode=1 if i in (2, 3) else i,
            sample=dataclasses.replace(s.sample, token_rewards=TOKEN_REWARDS.get(i)),
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
            dataclasses.replace(s, sample=dataclasses.replace(s.sample, token_rewards=rewards))
            for s in grouped_samples()
            for rewards in [[0.0] * (s.sample.trajectory.num_sampled - 1) + [s.sample.reward]]
        ]

    estimator = RewardEstimator(kind)
    assert made_on(2, estimator, samples_of=on_the_last_token) == made_on(1, estimator)


@pytest.mark.parametrize("kind", sorted({*IN_THE_CONTROLLER} - {"reinforce"}))
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


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_greedy_answers_reward_is_taken_off_as_in_verl(num_ranks, with_kl):
    """ReMax, whose baseline pays no KL; of what a token is left with, whether tokens pay or do not."""
    verl = PEERS["remax"]
    kl = PEERS["reinforce_plus_plus_by_token"]["kl"]
    paid = {i: [verl["kl_coef"] * x for x in each] for i, each in enumerate(kl)}

    def samples():
        return [
            dataclasses.replace(s, baseline=verl["baselines"][s.group]) for s in peers_samples()
        ]

    estimator = RewardEstimator("remax")
    found = made_on(num_ranks, estimator, samples_of=samples, paid=paid if with_kl else None)
    expected = verl["advantages_with_kl" if with_kl else "advantages"]
    assert found == [pytest.approx(each, abs=1e-6) for each in expected]


@pytest.mark.parametrize("kind", sorted({*ESTIMATORS} - {"gdpo", "remax"}))
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
            dataclasses.replace(
                s, sample=dataclasses.replace(s.sample, reward=s.sample.reward - sum(paid[i]))
            )
            for i, s in enumerate(grouped_samples())
        ]

    if not ESTIMATORS[kind].returns:
        expected = made_on(1, estimator, samples_of=smaller)
        assert found == [pytest.approx(each, abs=1e-6) for each in expected]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gdpo_normalises_each_named_reward_and_then_their_sum(num_ranks):
    """By the formula of TRL's normalize_then_sum (arXiv 2601.05242); grpo of the sum is another."""
    named = {"right": [1.0, 0.0, 0.0, 1.0], "format": [40.0, 10.0, 20.0, 30.0]}

    def samples():
        return [
            dataclasses.replace(
                s, group=i // 2, sample=dataclasses.replace(
                    s.sample, reward_parts={name: x[i] for name, x in named.items()}
                ),
            )
            for i, s in enumerate(grouped_samples()[:4])
        ]  # fmt: skip

    weights = {"right": 1.0, "format": 0.5}
    found = made_on(num_ranks, RewardEstimator("gdpo", named_weights=weights), samples_of=samples)
    half = 2**-0.5  # what grpo makes of two, but for its 1e-6
    sums = torch.tensor([1.5 * half, -1.5 * half, -1.5 * half, 1.5 * half]).double()
    expected = (sums / sums.std()).tolist()
    assert [each[0] for each in found] == pytest.approx(expected, abs=1e-5)
    outcomes = Outcomes.of(samples())
    with pytest.raises(TrainingError, match=r"--gdpo-reward-keys=style.*right, format"):
        outcomes.named_rewards(["style"])


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
    return {
        "policy": Scores(log_probs, torch.zeros_like(log_probs), torch.zeros_like(log_probs)),
        "reference": Scores(
            log_probs / 2, torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        ),
    }


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
        share = make_shares(grouped_samples(), 1, 1, 99)[0]
        batches = [packed_batch(share.samples, torch.device("cpu"))]
        token_advantages(Double(), share.outcomes, batches, {})


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


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_weights_are_the_same_on_1_and_2_ranks_by_an_estimator_that_reads_the_reference(
    ranks, checkpoint, reference, backend
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
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
