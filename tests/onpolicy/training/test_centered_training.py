"""Score centering in trainers, and the optimal token baseline: the same on any number of ranks; and 0
where the engine says the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from onpolicy.ops.likeliest_tokens import LikeliestTokens
from onpolicy.trajectory import Span
from tests.support.branched import branched_samples
from tests.support.likeliest_bytes import packed
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, weights
from tests.support.samples import with_trajectory
from tests.support.tiny import make_checkpoint

K = 6
TOLD, LOSS = "train/likeliest_share", "train/centering_loss"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("policy"), "qwen3")


def job(policy, backend="fsdp", objective="centered", estimator="reinforce", **fallback):
    return Job(
        path=policy,
        backend=backend,
        changes={
            "algorithm": {"policy_loss": objective, "advantage_estimator": estimator},
            "distillation": {"opd_top_k": K},
            "fallback": fallback,
            "trainer": {"max_tokens_per_gpu": 12},
        },
    )


def told(sample, number, scale=1.0):
    """What an engine of other weights might tell with each token; samples of earlier weights."""
    trajectory = sample.trajectory
    count, random = trajectory.num_sampled, np.random.default_rng(number)
    ids = np.stack([random.permutation(137)[:K] for _ in range(count)]).astype("<i4")
    shares = random.dirichlet(np.ones(K + 1), count)[:, :K]
    old = replace(sample, policy_version=1)
    spans = (Span(version=0, start=0, end=count),)
    values = np.log(scale * shares + 1e-9).astype("<f4")
    return with_trajectory(old, likeliest=packed(ids, values), spans=spans)


def learn(job):
    trainer = make(job)
    samples = [told(sample, i) for i, sample in enumerate(branched_samples(trainer))]
    metrics = trainer.train(samples, 1, [1e-3]).metrics
    return {k: x for k, x in metrics.items() if not k.startswith("perf/")}, weights(trainer)


TRM = {"use_rs": True, "rs_rules": ("seq_max_kl=5",)}


@pytest.mark.parametrize(
    ("objective", "estimator", "rules"),
    [("centered", "reinforce", {}), ("ppo", "otb", {}), ("ppo", "reinforce", TRM)],
    ids=["centered", "otb", "trm"],
)
def test_it_is_the_same_on_any_number_of_ranks(policy, backend, objective, estimator, rules):
    """By Megatron-core the vocabulary, the sequences and the layers are shared out too, where gradients
    are added in another order."""
    layouts = (
        [{}]
        if backend == "fsdp"
        else [{}, {"megatron_tp": 2}, {"megatron_cp": 2}, {"megatron_pp": 2}]
    )
    if objective != "centered":
        layouts = layouts[:3]
    whole = job(policy, backend, objective, estimator, use_tis=True, **rules)
    alone, pair = Ranks(1), Ranks(2)
    (metrics, after), *_ = alone.run(learn, whole)
    if objective == "centered":
        assert metrics[LOSS] != 0 < metrics[TOLD] < 1
    assert not rules or 0 < metrics["correction/rejected_high_fraction"] < 1
    for layout in layouts:
        (others, together), *_ = pair.run(learn, whole.under(layout))
        assert others.pop("train/grad_norm") == pytest.approx(metrics["train/grad_norm"])
        assert {**others, "train/grad_norm": metrics["train/grad_norm"]} == metrics
        assert layout or equal(after, together)
    alone.stop()
    pair.stop()


def test_where_the_engine_says_the_same_it_changes_no_bit(policy):
    """An engine that is an ulp off is seen."""

    def learnt(objective, change=lambda x: x):
        trainer = make(job(policy, objective=objective))
        samples = [told(sample, i) for i, sample in enumerate(branched_samples(trainer))]
        samples = [with_own(trainer, sample, change) for sample in samples]
        trainer.train(samples, 1, [1e-3])
        return weights(trainer)

    plain = learnt("reinforce")
    assert equal(learnt("centered"), plain)
    down = torch.tensor(-torch.inf)
    assert not equal(learnt("centered", lambda x: torch.nextafter(x, down)), plain)


def with_own(trainer, sample, change):
    """The sample, told what the trainer itself computes of these tokens."""
    from onpolicy.models.policy import PackedTokens

    trajectory = sample.trajectory
    asked = LikeliestTokens.of(trajectory.likeliest)
    batch = PackedTokens.pack(
        [trajectory.token_ids], [trajectory.sampled], [trajectory.temperatures]
    )
    with torch.no_grad():
        found = trainer.policy.module(replace(batch, likeliest=asked)).likeliest_log_probs
    values = change(found).numpy()
    return with_trajectory(sample, likeliest=packed(asked.tokens.int().numpy(), values))
