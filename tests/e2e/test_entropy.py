"""What a real server tells of the entropy of its tokens is the trainer's, bit for bit, and used."""

import dataclasses

import pytest
import torch

from onpolicy.config.flags import with_flags
from onpolicy.errors import ParityError
from onpolicy.ops.cuts import Cut
from onpolicy.rollout.sampling import trajectories_of
from onpolicy.train.batch import packed_batch
from onpolicy.types import Prompt, Sample, TrainSample
from tests.support.engines_fixture import make_requests

FILTERS = {"top_k": 60, "top_p": 0.8, "min_p": 0.02}


@pytest.fixture
def pair(engines, monkeypatch):
    """Of a run that learns from the tokens of the largest entropy, a few samples at a time."""
    config = with_flags(engines.config, {"top_entropy_quantile": 0.4})
    monkeypatch.setattr(engines.trainer.learner, "config", config)
    return engines


def samples_of(trajectories):
    prompt = Prompt(index=0, prompt_ids=[5], label="", text="")
    rewards = [(-1.0) ** i for i in range(len(trajectories))]
    pairs = enumerate(zip(trajectories, rewards, strict=True))
    return [
        TrainSample(
            sample=Sample(prompt=prompt, sample_index=i, trajectory=t, reward=reward),
            group=0,
            episode=i,
        )
        for i, (t, reward) in pairs
    ]


def sampled(pair, temperature=1.0, **filters):
    requests = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, return_entropy=True, **filters))
        for r in make_requests(12, seed=31, max_new_tokens=20, temperature=temperature)
    ]
    return trajectories_of(requests, pair.generate(requests))


def trainers(pair, trajectories):
    """The entropies that the trainer's policy has there."""
    batch = packed_batch(dict(enumerate(samples_of(trajectories))), torch.device("cpu"))
    (scores,) = pair.trainer.policy.score([batch.packed])
    return scores.entropy, batch.rollout_entropy


@pytest.mark.parametrize(("temperature", "filters"), [(1.0, {}), (0.7, {}), (1.3, FILTERS)])
def test_the_entropies_are_the_trainers(pair, temperature, filters):
    ours, told = trainers(pair, sampled(pair, temperature, **filters))
    assert torch.equal(ours, told) and len(told) == 12 * 20
    assert 0 < told.min() < told.max()


def test_a_distribution_that_is_not_renormalised_has_others(pair):
    whole = [dataclasses.replace(t, kept_tokens=[]) for t in sampled(pair, **FILTERS)]
    ours, told = trainers(pair, whole)
    assert (ours != told).all()


def train(pair, trajectories):
    """Metrics of a step of several micro-batches, and how often the policy was asked before it."""
    policy, passes = pair.trainer.policy, []
    score = policy.score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "score", lambda batches: passes.append(batches) or score(batches))
        metrics = pair.trainer.train(samples_of(trajectories), 0, [0.0]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, len(passes)


@pytest.mark.parametrize("filters", [{}, FILTERS])
def test_they_save_the_pass_before_the_step_and_change_nothing(pair, monkeypatch, filters):
    cut = Cut.of(*filters.values()) if filters else None
    monkeypatch.setattr(pair.trainer.learner, "cut", cut)
    trajectories = sampled(pair, **filters)
    told = train(pair, trajectories)
    untold = train(pair, [dataclasses.replace(t, entropy=[]) for t in trajectories])
    assert told[0] == untold[0] and (told[1], untold[1]) == (0, 1)
    assert told[0]["parity/num_mismatched_tokens"] == 0
    assert 0.3 < told[0]["train/learnt_fraction"] < 0.42


def test_one_entropy_that_is_a_bit_off_is_refused(pair):
    trajectories = sampled(pair)
    entropy = list(trajectories[-1].entropy)
    entropy[3] = torch.nextafter(torch.tensor(entropy[3]), torch.tensor(9.0)).item()
    trajectories[-1] = dataclasses.replace(trajectories[-1], entropy=entropy)
    with pytest.raises(ParityError, match=r"^1 of \d+ tokens have another entropy in training"):
        train(pair, trajectories)


def test_answers_tell_nothing_that_nobody_asked_for(engines):
    requests = make_requests(2, seed=32)
    assert [answer.entropy for answer in engines.generate(requests)] == [[], []]
