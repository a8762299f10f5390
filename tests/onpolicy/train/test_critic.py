"""A critic beside the policy: the same bits on any number of ranks, and after a checkpoint."""

import dataclasses

import pytest
import torch

from onpolicy.train.batch import packed_batch
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, make_samples, weights

BACKENDS = ["fsdp", "megatron"]
CRITIC = {"critic_lr": 1e-2, "critic_lr_warmup_iters": 3, "lambd": 0.9}


def job_of(path, backend, dtype="float32", **critic):
    algorithm = {"advantage_estimator": "gae", "gamma": 0.97}
    return Job(
        path=path,
        backend=backend,
        dtype=dtype,
        changes={
            "algorithm": algorithm,
            "critic": {**CRITIC, **critic},
            "trainer": {"global_batch_size": 4},
        },
    )


def with_token_rewards(samples):
    """Every other sample says what each token earned."""
    return [
        dataclasses.replace(
            s,
            sample=dataclasses.replace(
                s.sample,
                token_rewards=[0.1 * (t % 5) - 0.2 for t in s.sample.trajectory.response_ids]
                if i % 2
                else None,
            ),
        )
        for i, s in enumerate(samples)
    ]


def learn(job, steps=(0, 1), save=None, load=None, moves=False):
    """(metrics of each rollout of two optimizer steps, the policy's weights, the critic's values)."""
    trainer = make(job)
    if load is not None:
        trainer.load(load)
    metrics = []
    for step in steps:
        samples = with_token_rewards(make_samples(trainer, seed=step))
        found = trainer.train(samples, step, [1e-3, 1e-3]).metrics
        metrics.append({k: x for k, x in found.items() if not k.startswith("perf/")})
        if moves:
            trainer.release_memory("state")
            trainer.release_memory("weights")
        if save is not None and step == 0:
            trainer.save(save)
    trainer._bring_back("weights", "state")
    return metrics, weights(trainer), values_of(trainer)


def values_of(trainer):
    batch = packed_batch(dict(enumerate(make_samples(trainer, seed=9))), torch.device("cpu"))
    return trainer.models["critic"].score([batch.packed])[0].values


def same(a, b):
    return a[0] == b[0] and equal(a[1], b[1]) and torch.equal(a[2], b[2])


@pytest.fixture(scope="module")
def ranks():
    groups = {count: Ranks(count) for count in (1, 2, 3)}
    yield groups
    for group in groups.values():
        group.stop()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_critic_and_its_policy_have_the_same_bits_on_1_2_and_3_ranks_and_after_a_checkpoint(
    ranks, checkpoint, backend, tmp_path
):
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    job = job_of(checkpoint, backend, "bfloat16")
    alone = ranks[1].run(learn, job)[0]
    assert alone[0][0]["parity/num_mismatched_tokens"] == 0
    assert alone[0][0]["critic/grad_norm"] > 0 and alone[2].abs().min() > 0
    rates = [step["critic/lr"] for step in alone[0]]
    assert rates == pytest.approx([1e-2 / 2, 1e-2])  # means of two steps
    assert same(ranks[2].run(learn, job, (0, 1), tmp_path)[0], alone)
    assert same(ranks[3].run(learn, job)[0], alone)
    for count in (1, 3):
        metrics, *end = ranks[count].run(learn, job, (1,), None, tmp_path)[0]
        assert same((alone[0][:1] + metrics, *end), alone)
    assert same(ranks[1].run(learn, job, (0, 1), None, None, True)[0], alone)  # memory that left
    other = ranks[1].run(learn, job_of(checkpoint, backend, "bfloat16", lambd=0.8))[0]
    assert not torch.equal(other[2], alone[2]) and not equal(other[1], alone[1])
