"""Terms of the loss beside the objective: peers' numbers, formulas, and what decides over a batch."""

from dataclasses import replace

import pytest
import torch

from onpolicy.algorithm.objectives import ObjectiveConfig
from onpolicy.algorithm.selection import clip_cov, covariances, kl_cov, smallest, top_entropy
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.train.loss import LossSettings, policy_loss
from onpolicy.train.marks import marked
from tests.support.onpolicy_batches import (
    make_batch,
    make_micro_batches,
    scored_batch,
    weighed_batch,
)
from tests.support.peer_losses import INPUTS, case_of, packed, peer_batch
from tests.support.ranks import on_ranks
from tests.support.samples import make_train_sample

CLIPPED = LossSettings(objective=ObjectiveConfig(eps_clip=0.2, eps_clip_high=0.28))


def require_peers(name, settings, log_probs, batch, value=True):
    """The loss and the gradient that the peer's function gave."""
    case = case_of(name)
    loss, _ = policy_loss(log_probs, batch, settings)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx(packed(case["gradient"]).tolist(), abs=1e-6)
    assert not value or loss.item() == pytest.approx(case["loss"], abs=1e-6)


def test_the_squared_log_ratio_is_that_of_verls_dro():
    coef = case_of("verl dro")["ours"]["log_ratio_coef"]
    reinforce = ObjectiveConfig(kind="reinforce")
    settings = LossSettings(objective=reinforce, log_ratio_coef=coef)
    require_peers("verl dro", settings, *peer_batch())


def test_a_rejected_token_has_no_squared_log_ratio_whatever_its_values():
    old, kept = torch.tensor([0.0, torch.nan]), torch.tensor([True, False])
    log_probs, batch = make_batch([2.0, 1.0], [0.0, 0.0], old_log_probs=old, kept=kept)
    loss, metrics = policy_loss(log_probs, batch, LossSettings(log_ratio_coef=3.0))
    assert metrics["train/squared_log_ratio"].item() == pytest.approx(log_probs[0].item() ** 2 / 2)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx([3 * log_probs[0].item(), 0])


def test_a_tokens_weight_multiplies_its_objective_and_nothing_beside_it():
    settings = LossSettings(objective=ObjectiveConfig(kind="reinforce"), entropy_coef=0.5)
    entropy, weights = torch.tensor([0.3, 0.2, 0.1]), torch.tensor([0.0, 1.0, 2.5])
    log_probs, batch = make_batch([0.5, 2.0, 3.0], [1.0, -1.0, 0.5])
    _, plain = policy_loss(log_probs, batch, settings, entropy)
    weighed = replace(batch, token_weights={"objective": weights})
    loss, found = policy_loss(log_probs, weighed, settings, entropy)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    by_token = weights * batch.shares * -batch.advantages
    assert torch.equal(gradient, by_token)
    expected = (by_token * log_probs).sum().item()
    assert found["train/pg_loss"].item() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(found["train/entropy"], plain["train/entropy"])
    assert not torch.equal(found["train/pg_loss"], plain["train/pg_loss"])


def test_weights_are_packed_with_their_samples_and_are_1_of_those_without():
    samples = [make_train_sample(range(1 + n), 1, [0.0] * n, 0.0, i) for i, n in enumerate((2, 1))]
    samples[0].sample.token_weights = {"objective": [0.0, 3.0]}
    samples[1].sample.token_weights = {"kl_loss": [0.5]}
    (batch,) = make_micro_batches(samples, max_tokens=99)
    said = {"objective": {0: [0.0, 3.0], 1: [1.0]}, "kl_loss": {0: [1.0, 1.0], 1: [0.5]}}
    assert {term: x.tolist() for term, x in batch.token_weights.items()} == {
        term: [x for n in batch.numbers for x in each[n]] for term, each in said.items()
    }
    for each in samples:
        each.sample.token_weights = {}
    (batch,) = make_micro_batches(samples, max_tokens=99)
    assert batch.token_weights == {}


WEIGHTS = {
    "objective": [0.0, 1.0, 2.5, 0.5], "kl_loss": [1.0, 0.0, 0.5, 3.0], "opd_kl": [0.5, 2.0, 0.0, 1.0],
    "entropy": [3.0, 0.25, 1.0, 0.0], "log_ratio": [0.0, 4.0, 1.0, 0.5],
    "positive_nll": [2.0, 0.5, 0.0, 1.5],
}  # fmt: skip


def weighed_loss(weights):
    """(loss, its gradients, metrics) of all terms, of a batch whose last token was rejected."""
    settings = LossSettings(
        objective=ObjectiveConfig(kind="reinforce"), kl_loss_coef=0.3, kl_loss_type="k2",
        opd_kl_coef=0.7, entropy_coef=0.2, log_ratio_coef=0.4, positive_nll_coef=0.6,
    )  # fmt: skip
    log_probs, batch = make_batch(
        [0.5, 2.0, 3.0, 1.5], [1.0, -1.0, 0.5, 2.0], ref_log_probs=torch.tensor([-0.5, 0.1, 0.7, 9.0]),
        kept=torch.tensor([True, True, True, False]),
        positive_shares=torch.tensor([0.5, 0.0, 0.25, 0.25]),
        token_weights={term: torch.tensor(each) for term, each in weights.items()},
    )  # fmt: skip
    beside = [
        torch.tensor(x, requires_grad=True) for x in ([0.3, 0.2, 0.1, 0.4], [0.2, 0.5, 0.9, 1])
    ]
    loss, metrics = policy_loss(log_probs, batch, settings, *beside)
    return loss, torch.autograd.grad(loss, (log_probs, *beside)), metrics, log_probs


def test_the_loss_is_the_sum_of_each_terms_tokens_times_their_weights_over_all_tokens():
    """Against sums by hand, in float64."""
    loss, found, *_, log_probs = weighed_loss(WEIGHTS)
    shares = torch.tensor([0.25, 0.25, 0.25, 0], dtype=torch.float64)
    positive = torch.tensor([0.5, 0, 0.25, 0], dtype=torch.float64)
    doubled = {term: torch.tensor(each, dtype=torch.float64) for term, each in WEIGHTS.items()}
    x = log_probs.detach().double().requires_grad_()
    beside = [[0.3, 0.2, 0.1, 0.4], [0.2, 0.5, 0.9, 1]]
    entropy, kl = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in beside)
    advantages, reference = torch.tensor([[1.0, -1, 0.5, 2], [-0.5, 0.1, 0.7, 9]]).double()
    expected = sum(
        [
            (doubled["objective"] * shares * -advantages * x).sum(),
            0.3 * (doubled["kl_loss"] * shares * (x - reference) ** 2 / 2).sum(),
            0.7 * (doubled["opd_kl"] * shares * kl).sum(),
            -0.2 * (doubled["entropy"] * shares * entropy).sum(),
            0.4 * (doubled["log_ratio"] * shares * x**2).sum(),
            0.6 * (doubled["positive_nll"] * positive * -x).sum(),
        ]
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(expected, (x, entropy, kl))
    for one, other in zip(found, gradients, strict=True):
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-6, abs=1e-9)


METRICS = {
    "objective": "train/pg_loss", "kl_loss": "train/kl_loss", "opd_kl": "distillation/kl_loss",
    "entropy": None, "log_ratio": "train/squared_log_ratio", "positive_nll": "train/positive_nll",
}  # fmt: skip
"""Of each term; that of the entropy is the policy's."""


@pytest.mark.parametrize("term", WEIGHTS)
def test_weights_of_a_term_change_no_other_and_ones_change_no_bit(term):
    plain, gradients, metrics, _ = weighed_loss({})
    loss, found, changed, _ = weighed_loss({term: WEIGHTS[term]})
    differ = {name for name in metrics if not torch.equal(metrics[name], changed[name])}
    assert differ == {"train/loss", METRICS[term]} - {None} and not torch.equal(loss, plain)
    loss, found, same, _ = weighed_loss({term: [1.0] * 4})
    assert torch.equal(loss, plain) and metrics == same
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


ALGORITHM = groups.AlgorithmConfig(positive_nll_coef=0.5, positive_nll_above=0.1)
REWARDS, LENGTHS = (0.1, 1.0, -1.0, 0.3), (2, 3, 1, 2)


def steps(algorithm, max_tokens=99, num_ranks=1, rollout=0):
    """The marked micro-batches of every rank, of one optimizer step."""
    config = TrainConfig(algorithm=algorithm)
    samples = [
        make_train_sample(range(1 + n), 1, [-0.5 - i / 7 + t / 5 for t in range(n)], reward, i)
        for i, (n, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]

    def on_rank(rank):
        batches = make_micro_batches(samples, max_tokens=max_tokens, rank=rank, num_ranks=num_ranks)
        scored = [scored_batch(b, b.rollout_log_probs) for b in batches]
        scored = [replace(b, entropy=b.rollout_log_probs.square()) for b in scored]
        return marked([weighed_batch(b, b.mask) for b in scored], config, rollout)

    return [batch for step in on_ranks(num_ranks, on_rank) for batch in step]


def marks(algorithm, name, rollout=0):
    """What each sample's tokens are marked with, by its number: the same however a step is cut."""
    found = []
    for max_tokens, num_ranks in ((99, 1), (4, 1), (99, 2), (4, 3)):
        found.append({})
        for batch in steps(algorithm, max_tokens, num_ranks, rollout):
            parts = getattr(batch, name).split(batch.response_lens)
            found[-1] |= {n: x.tolist() for n, x in zip(batch.numbers, parts, strict=False)}
    assert found == found[:1] * len(found) and len(found[0]) == len(LENGTHS)
    return found[0]


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("token-mean", (0.2, 0.2)),
        ("seq-mean-token-mean", (1 / 6, 1 / 4)),
        ("seq-mean-token-sum", (0.5, 0.5)),
    ],
)
def test_samples_of_a_high_reward_are_imitated_by_a_mean_over_them_alone(aggregation, shares):
    algorithm = replace(ALGORITHM, loss_aggregation=aggregation)
    found = marks(algorithm, "positive_shares")
    assert found[0] == [0, 0] and found[2] == [0]
    assert found[1] == pytest.approx([shares[0]] * 3) and found[3] == pytest.approx([shares[1]] * 2)


def test_the_imitation_is_the_mean_negative_log_probability():
    (batch,) = steps(ALGORITHM)
    log_probs = torch.arange(8.0).neg().requires_grad_()
    loss, metrics = policy_loss(log_probs, batch, LossSettings(positive_nll_coef=0.5))
    assert metrics["train/positive_nll"].item() == pytest.approx((2 + 3 + 4 + 6 + 7) / 5)
    assert loss.item() - metrics["train/pg_loss"].item() == pytest.approx(0.5 * 22 / 5)
    plain, _ = policy_loss(log_probs, replace(batch, positive_shares=None), LossSettings())
    (gradient,) = torch.autograd.grad(loss - plain, log_probs)
    assert gradient.tolist() == pytest.approx([0, 0, *[-0.1] * 3, 0, *[-0.1] * 2], abs=1e-6)


def test_nothing_is_marked_without_being_asked_for():
    (batch,) = steps(groups.AlgorithmConfig())
    assert batch.positive_shares is batch.learnt is batch.restrained is None


def test_the_tokens_of_the_largest_entropy_are_those_of_trl():
    log_probs, batch = peer_batch()
    share = case_of("trl top_entropy_quantile")["ours"]["top_entropy_quantile"]
    learnt = top_entropy(batch.tokens(log_probs), packed(INPUTS["entropy"]), share)
    require_peers("trl top_entropy_quantile", CLIPPED, log_probs, replace(batch, learnt=learnt))


def covariances_of(log_probs, batch):
    tokens = batch.tokens(log_probs)
    return tokens, covariances(tokens, log_probs, batch.advantages)


def test_clip_cov_is_verls_where_it_takes_all_within_the_bounds():
    """As verl does, of the tokens that PPO does not clip already."""
    log_probs, batch = peer_batch()
    ours, (tokens, values) = case_of("verl clip_cov")["ours"], covariances_of(log_probs, batch)
    ratio = (log_probs - batch.old_log_probs).exp().detach()
    is_clipped = torch.where(batch.advantages > 0, ratio > 1.28, ratio < 0.8)
    bounds = ours["clip_cov_lb"], ours["clip_cov_ub"]
    values = torch.where(is_clipped, -torch.inf, values)
    left_out = clip_cov(tokens, values, torch.rand(13), ours["clip_cov_ratio"], bounds)
    assert 1 < left_out.sum() < 13
    require_peers("verl clip_cov", CLIPPED, log_probs, replace(batch, learnt=~left_out))


def test_kl_cov_is_verls():
    """With the clip of our recipe, which verl's has not."""
    log_probs, batch = peer_batch()
    ours, (tokens, values) = case_of("verl kl_cov")["ours"], covariances_of(log_probs, batch)
    recipe = parse(TrainConfig, ["--recipe", "kl_cov"], "onpolicy train")
    settings = replace(LossSettings.of(recipe), kl_cov_coef=ours["kl_cov_coef"])
    restrained = kl_cov(tokens, values, torch.rand(13), ours["kl_cov_ratio"])
    require_peers("verl kl_cov", settings, log_probs, replace(batch, restrained=restrained))


def test_the_smallest_of_all_ranks_are_chosen_and_draws_decide_between_equals():
    values = torch.tensor([2.0, 1, 1, 1, 0, -1]).double()
    draws = torch.tensor([0.0, 0.3, 0.1, 0.2, 0.9, 0]).double()
    among = torch.tensor([True] * 5 + [False])
    chosen = smallest(values, draws, among, 3)
    assert chosen.tolist() == [False, False, True, True, True, False]
    whole = torch.stack((values, draws), dim=1)[among]
    parts = [
        smallest(values[part], draws[part], among[part], 3, lambda _: whole)
        for part in (slice(2), slice(2, None))
    ]
    assert torch.equal(torch.cat(parts), chosen)
    assert torch.equal(smallest(values, draws, among, 5), among)


ENTROPY = groups.AlgorithmConfig(top_entropy_quantile=0.5)
COV = groups.AlgorithmConfig(
    clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.4
)  # fmt: skip


def count(found):
    return sum(map(sum, found.values()))


def test_marks_of_entropy_and_covariance_do_not_depend_on_how_a_step_is_cut():
    assert count(marks(ENTROPY, "learnt")) == 4
    assert count(marks(COV, "learnt")) == 8 - 2 and count(marks(COV, "restrained")) == 3
    both = marks(replace(COV, top_entropy_quantile=0.5), "learnt")
    assert 2 <= count(both) <= 4


def test_which_tokens_clip_cov_leaves_out_is_drawn_anew_in_each_rollout():
    assert len({str(marks(COV, "learnt", rollout)) for rollout in range(4)}) > 1


def test_a_token_that_is_not_learnt_has_no_loss_but_its_part_of_the_mean():
    log_probs, batch = make_batch([1.1, 1.1], [1.0, 1.0], learnt=torch.tensor([True, False]))
    loss, metrics = policy_loss(log_probs, batch, LossSettings())
    assert loss.item() == pytest.approx(-1.1 / 2) and metrics["train/learnt_fraction"] == 0.5
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient.tolist() == pytest.approx([-1.1 / 2, 0])
