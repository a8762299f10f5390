"""The trainer draws again what engines say that they drew, on the paths that a rollout takes."""

import dataclasses
import re

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.ops.kept_tokens import Cut
from onpolicy.ops.log_probs import Scores, token_log_probs
from onpolicy.training.batch import packed_batch
from onpolicy.trajectory import Span
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, weights
from tests.support.drawing_engine import (
    ENGINES_OF_THEIR_OWN_MIND,
    from_the_whole_vocabulary,
    greedy,
    sampled,
)
from tests.support.samples import with_trajectory

__all__ = ["make"]

CUTS = {
    "top-k": {"rollout_top_k": 9},
    "top-p": {"rollout_top_p": 0.8},
    "min-p": {"rollout_min_p": 0.1},
    "all": {"rollout_top_k": 20, "rollout_top_p": 0.9, "rollout_min_p": 0.02},
}
OTHERWISE = r"^(\d+) of (\d+) tokens that were drawn again are others than the rollout's"


def cut_of(values):
    whole = {"rollout_top_k": -1, "rollout_top_p": 1.0, "rollout_min_p": 0.0}
    return Cut.of(*(whole | values).values())


def draws(metrics):
    names = ("compared", "redrawn", "drawn_otherwise", "mismatched", "excused")
    return tuple(metrics[f"parity/num_{name}_tokens"] for name in names)


@pytest.fixture
def trained(make):
    """Trains on what an engine sampled; its metrics."""

    def train(*how, then=list, **changes):
        trainer = make(**changes)
        cut = cut_of(changes.get("rollout", {}))
        return trainer.train(then(sampled(trainer, *how, cut=cut)), 0, RATES).metrics

    return train


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", [{}, *CUTS.values()], ids=["no cut", *CUTS])
def test_what_is_drawn_by_the_seeds_is_drawn_again_to_the_last_token(trained, cut, dtype):
    assert draws(trained(rollout=cut, dtype=dtype)) == (24, 24, 0, 0, 0)


@pytest.mark.parametrize("how", ENGINES_OF_THEIR_OWN_MIND, ids=lambda how: how.__name__)
def test_an_engine_that_draws_otherwise_ends_the_run_though_its_log_probs_are_right(make, how):
    trainer = make()
    before = weights(trainer)
    with pytest.raises(ParityError, match=OTHERWISE) as error:
        trainer.train(sampled(trainer, how), 0, RATES)
    found = re.search(
        r"First: step=0, prompt (\d), sample 0, response position=(\d): rollout=(\d+), train=(\d+), "
        r"sampling_seed=(\d+), position=(\d+)\. No step was taken\. Have engines of this version",
        str(error.value),
    )
    prompt, place, rollout, train, seed, position = map(int, found.groups())
    assert rollout != train and seed == prompt * 7919 + 12345
    assert position == (2, 1, 3, 2)[prompt] + place - 1
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_a_filter_that_is_told_and_not_drawn_from_is_found(trained, cut):
    with pytest.raises(ParityError, match=OTHERWISE):
        trained(from_the_whole_vocabulary, rollout=cut)


@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_a_filter_that_an_engine_has_never_heard_of_is_found(make, cut):
    """It draws from all by the seeds, tells the log-probabilities of all, and no sets."""
    trainer = make(rollout=cut)
    with pytest.raises(ParityError, match="tokens have another log-probability in training"):
        trainer.train(sampled(trainer), 0, RATES)


@pytest.mark.parametrize("cut", CUTS.values(), ids=[*CUTS])
def test_a_probe_of_engines_that_say_nothing_of_a_filter_finds_it(make, cut):
    """Tokens that count as drawn from all, where the trainer's own cut leaves fewer, have NaN."""
    trainer = make(rollout=cut)
    sample = sampled(trainer, cut=cut_of(cut), temperature=1.0)[0]
    asked = [sample.token_ids], [len(sample.prompt.prompt_ids)], 1.0
    ((told, *_),) = trainer.rescore(*asked, [sample.trajectory.kept_tokens])
    ((untold, *_),) = trainer.rescore(*asked)
    assert told.tolist() == sample.rollout_log_probs and untold.isnan().any()


def test_a_run_that_may_fall_back_ends_too_since_weights_of_equal_log_probs_are_1(trained):
    falls_back = {"parity": {"parity_policy": "fallback"}, "fallback": {"use_tis": True}}
    with pytest.raises(ParityError, match=OTHERWISE):
        trained(greedy, **falls_back)


def test_a_run_that_is_to_warn_says_how_many_and_goes_on(trained, caplog):
    metrics = trained(greedy, parity={"parity_policy": "warn"})
    _, redrawn, otherwise, mismatched, _ = draws(metrics)
    assert redrawn == 24 > otherwise > 0 == mismatched
    assert f"{otherwise} of 24 tokens that were drawn again are others" in caplog.text


def test_without_the_mode_nothing_is_drawn_again(make, trained):
    metrics = trained(greedy, aligned=False)
    assert not [name for name in metrics if "drawn" in name or "excused" in name]


def test_a_trainer_that_forgets_a_token_ends_the_run_in_our_words(make, monkeypatch):
    def short(*args):
        return Scores(*(x[:-1] for x in token_log_probs(*args)))

    trainer = make()
    samples = sampled(trainer)
    monkeypatch.setattr("onpolicy.models.policy.token_log_probs", short)
    with pytest.raises(
        ParityError, match=r"^step=0: what the trainer says of .* is off by 2 tokens"
    ):
        trainer.train(samples, 0, RATES)


def test_one_token_that_is_taken_for_an_older_one_ends_a_run_in_which_none_is(make, monkeypatch):
    def one_older(*args):
        batch = packed_batch(*args)
        batch.lags[3] = 1
        return batch

    trainer = make()
    before, samples = weights(trainer), sampled(trainer)
    monkeypatch.setattr("onpolicy.training.learner.packed_batch", one_older)
    with pytest.raises(
        ParityError, match=r"^step=0: 23 tokens were compared with the rollout, and 24"
    ):
        trainer.train(samples, 0, RATES)
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in trainer.policy.module.parameters())


def test_tokens_without_a_seed_are_said_not_to_be_drawn_again(trained):
    def forget(samples):
        samples[1].seeds = ()
        return samples

    assert draws(trained(then=forget)) == (24, 18, 0, 0, 0)


def test_seeds_of_more_tokens_than_were_sampled_are_refused(trained):
    def too_many(samples):
        samples[1].seeds = [(12, 7)]
        return samples

    with pytest.raises(ParityError, match="prompt 1, sample 0: seeds=7 tokens, sampled=6:"):
        trained(then=too_many)


@pytest.mark.parametrize("most", [1, 100], ids=["alone", "packed"])
def test_tokens_of_earlier_weights_are_excused_and_counted(make, most):
    trainer = make(rollout={"rollout_lag": 1}, trainer={"max_tokens_per_gpu": most})
    spans = (Span(version=4, start=0, end=2), Span(version=5, start=2, end=6))
    samples = [
        dataclasses.replace(with_trajectory(s, spans=spans), policy_version=5)
        for s in sampled(trainer)
    ]
    assert draws(trainer.train(samples, 5, RATES).metrics) == (16, 16, 0, 0, 8)


def test_tokens_of_later_optimizer_steps_are_excused_and_counted(make):
    trainer = make()
    assert draws(trainer.train(sampled(trainer), 0, RATES * 2).metrics) == (12, 12, 0, 0, 12)


def test_spans_that_lack_a_token_are_refused(make):
    trainer = make(rollout={"rollout_lag": 1})
    spans = (Span(version=5, start=0, end=5),)
    samples = [
        dataclasses.replace(with_trajectory(s, spans=spans), policy_version=5)
        for s in sampled(trainer)
    ]
    with pytest.raises(ParityError, match="prompt 0, sample 0: spans=5 tokens, sampled=6"):
        trainer.train(samples, 5, RATES)


def shared(make, value):
    group = [[5, 9, 30, 31]] * 4
    trainer = make(trainer={"share_prefixes": value})
    samples = sampled(trainer, prompts=group)
    metrics = trainer.train(samples, 0, RATES).metrics
    return draws(metrics), "train/distinct_tokens_share" in metrics


def test_rows_that_several_sequences_share_are_drawn_from_once_for_each(make):
    assert shared(make, "on") == ((24, 24, 0, 0, 0), True)
    assert shared(make, "off") == ((24, 24, 0, 0, 0), False)


def test_a_trainer_asked_by_a_probe_draws_every_token_again(make):
    trainer = make()
    samples = sampled(trainer, temperature=1.0)
    asked = [s.token_ids for s in samples], [len(s.prompt.prompt_ids) for s in samples], 1.0
    found = trainer.rescore(*asked, seeds=[s.seeds[0][0] for s in samples])
    assert [each.drawn.tolist() for each in found] == [s.response_ids for s in samples]
    others = trainer.rescore(*asked, seeds=[s.seeds[0][0] + 1 for s in samples])
    assert [each.drawn.tolist() for each in others] != [s.response_ids for s in samples]
    for each, other in zip(trainer.rescore(*asked), found, strict=True):
        assert each.drawn.isnan().all() and torch.equal(each.log_probs, other.log_probs)
