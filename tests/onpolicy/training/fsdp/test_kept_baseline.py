"""A trainer that compares only the answers that a mask keeps (--rs-baseline kept)."""

import dataclasses

import pytest
import torch

from tests.onpolicy.training.fsdp.test_lag import of_version
from tests.onpolicy.training.fsdp.test_trainer import RATES, make_samples, maker_of, weights
from tests.support.samples import with_log_probs
from tests.support.tiny import make_checkpoint

MASK = {
    "use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0,
    "rejected_in_denominator": False,
}  # fmt: skip
REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
REJECTED = (1, 4)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return maker_of(make_checkpoint(tmp_path_factory.mktemp("kept")))


def two_groups(trainer, apart=2.0):
    """Two prompts with three answers each, drawn one push ago. The mask rejects two of them, one in
    each, to whose first tokens the engine gave `apart` more."""
    samples = make_samples(trainer, 6)
    for i, reward in enumerate(REWARDS):
        first, *rest = samples[i].rollout_log_probs
        changed = with_log_probs(samples[i], [first + apart * (i in REJECTED), *rest])
        old = of_version(changed, 4)
        samples[i] = dataclasses.replace(old, reward=reward, group=i // 3, episode=i)
    return samples


def learnt(make, baseline, left_out=(), steps=1, estimator="grpo"):
    """(weights, metrics) after a rollout without some of the samples."""
    flags = {**MASK, "rs_baseline": baseline}
    one_by_one = {"max_tokens_per_gpu": 1}
    trainer = make(fallback=flags, algorithm={"advantage_estimator": estimator}, trainer=one_by_one)
    samples = [s for i, s in enumerate(two_groups(trainer)) if i not in left_out]
    metrics = trainer.train(samples, 0, RATES * steps).metrics
    return weights(trainer), metrics


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_it_learns_to_the_bit_as_if_rejected_answers_had_not_been_drawn(make, estimator):
    kept, metrics = learnt(make, "kept", estimator=estimator)
    without, _ = learnt(make, "all", REJECTED, estimator=estimator)
    assert metrics["correction/rejected_fraction"] > 0.05 and equal(kept, without)
    every, _ = learnt(make, "all", estimator=estimator)
    assert not equal(kept, every)


def test_it_compares_in_every_optimizer_step_what_the_policy_before_the_first_one_keeps(make):
    kept, _ = learnt(make, "kept", steps=2)
    every, _ = learnt(make, "all", steps=2)
    assert not equal(kept, every)


def test_without_a_rejected_answer_it_changes_no_bit(make):
    def of(baseline):
        trainer = make(
            fallback={**MASK, "rs_baseline": baseline}, algorithm={"advantage_estimator": "grpo"}
        )
        trainer.train(two_groups(trainer, apart=0.0), 0, RATES)
        return weights(trainer)

    assert equal(of("kept"), of("all"))
