"""A critic beside the policy: the same bits on any number of ranks, in any layout, and after a
checkpoint, which transformers reads too."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from onpolicy.training.batch import packed_batch
from tests.support.megatron_ranks import Ranks
from tests.support.megatron_training import Job, equal, make, make_samples, weights
from tests.support.tiny import make_checkpoint

CRITIC = {"critic_lr": 1e-2, "lambd": 0.9}


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
            token_rewards=[0.1 * (t % 5) - 0.2 for t in s.trajectory.response_ids]
            if i % 2
            else None,
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


def token_classifier(directory, architecture="qwen3", **changes):
    """A checkpoint whose model gives every token a number."""
    file = make_checkpoint(directory, architecture, **changes) / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn(1, 96, generator=torch.Generator().manual_seed(5))
    save_file({**tensors, "score.weight": head, "score.bias": torch.tensor([0.125])}, file)
    return directory


def same(a, b):
    return a[0] == b[0] and equal(a[1], b[1]) and torch.equal(a[2], b[2])


@pytest.fixture(scope="module")
def ranks():
    groups = {count: Ranks(count) for count in (1, 2, 3)}
    yield groups
    for group in groups.values():
        group.stop()


def test_a_critic_and_its_policy_have_the_same_bits_on_1_2_and_3_ranks_and_after_a_checkpoint(
    ranks, checkpoint, backend, tmp_path
):
    job = job_of(checkpoint, backend, "bfloat16")
    alone = ranks[1].run(learn, job)[0]
    assert alone[0][0]["parity/num_mismatched_tokens"] == 0
    assert alone[0][0]["critic/grad_norm"] > 0 and alone[2].abs().min() > 0
    rates = [step["critic/lr"] for step in alone[0]]
    assert rates == pytest.approx([1e-2, 1e-2])
    assert same(ranks[2].run(learn, job, (0, 1), tmp_path)[0], alone)
    assert same(ranks[3].run(learn, job)[0], alone)
    for count in (1, 3):
        metrics, *end = ranks[count].run(learn, job, (1,), None, tmp_path)[0]
        assert same((alone[0][:1] + metrics, *end), alone)
    assert same(ranks[1].run(learn, job, (0, 1), None, None, True)[0], alone)  # memory that left
    exported = job_of(checkpoint, backend, "bfloat16", critic_load=str(tmp_path / "critic/hf"))
    saved = ranks[1].run(learn, job, (), None, tmp_path)[0][2]
    assert torch.equal(ranks[1].run(learn, exported, ())[0][2], saved) and saved.abs().min() > 0
    other = ranks[1].run(learn, job_of(checkpoint, backend, "bfloat16", lambd=0.8))[0]
    assert not torch.equal(other[2], alone[2]) and not equal(other[1], alone[1])


def test_beside_adapters_a_critic_learns_whole_what_it_learns_beside_a_policy_without(
    checkpoint, tmp_path
):
    """In the first rollout, in which both policies are the base; and a run goes on with its bits."""
    job, plain = job_of(checkpoint, "fsdp"), job_of(checkpoint, "fsdp")
    job.changes["lora"] = {"lora_rank": 4}
    whole, beside = learn(job, save=tmp_path), learn(plain, (0,))

    def of_critic(metrics):
        return {name: x for name, x in metrics.items() if name.startswith("critic/")}

    assert of_critic(whole[0][0]) == of_critic(beside[0][0]) and whole[0][0]["critic/vf_loss"] > 0
    assert whole[0][1]["parity/num_mismatched_tokens"] == 0
    metrics, *end = learn(job, (1,), load=tmp_path)
    assert same((whole[0][:1] + metrics, *end), whole)
    trainer = make(job)
    policy, critic = trainer.policy.module, trainer.models["critic"].module
    assert all((".lora." in name) == p.requires_grad for name, p in policy.named_parameters())
    assert all(".lora." not in name and p.requires_grad for name, p in critic.named_parameters())


def test_an_exported_critic_is_a_token_classifier_of_transformers(checkpoint, tmp_path):
    begun = token_classifier(tmp_path / "begun")
    trainer = make(job_of(checkpoint, "fsdp", critic_load=str(begun)))
    trainer.train(with_token_rewards(make_samples(trainer)), 0, [1e-3])
    samples = make_samples(trainer, seed=9)
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved/critic/hf")
    assert type(model).__name__ == "Qwen3ForTokenClassification"

    def said_by_transformers():
        each = [sample.trajectory for sample in samples]
        logits = [model(torch.tensor([t.token_ids])).logits[0, :, 0].detach() for t in each]
        return torch.cat([x[:-1][-t.num_sampled :] for x, t in zip(logits, each, strict=True)])

    values = values_of(trainer)
    torch.testing.assert_close(said_by_transformers(), values, rtol=0, atol=1e-4)
    with torch.no_grad():
        model.score.bias.zero_()
    assert (said_by_transformers() - values).abs().min() > 0.1


LAYOUTS = {
    "tensor": {"megatron_tp": 2},
    "tensor and sequence": {"megatron_tp": 2, "megatron_sequence_parallel": True},
    "context": {"megatron_cp": 2},
    "pipeline": {"megatron_pp": 2},
    "experts": {"megatron_ep": 2},
}
EXPERTS = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts_per_tok": 3}


def before_and_after(job):
    """(values before a step, its metrics, the critic's weights after it)."""
    trainer = make(job)
    values = values_of(trainer)
    metrics = trainer.train(with_token_rewards(make_samples(trainer)), 0, [1e-3]).metrics
    buckets = trainer.models["critic"].weight_buckets(1 << 30)
    return values, metrics, {name: tensor for bucket in buckets for name, tensor in bucket}


def test_in_every_layout_a_critic_of_experts_says_and_learns_what_it_does_on_one_rank(
    ranks, tmp_path
):
    pytest.importorskip("megatron.core")
    policy = make_checkpoint(tmp_path / "policy", "qwen3-moe", **EXPERTS)
    begun = token_classifier(tmp_path / "critic", "qwen3-moe", **EXPERTS)
    job = job_of(policy, "megatron", critic_load=str(begun))
    job.changes["trainer"]["adam_eps"] = 1e-2  # or a step may hang on rounding alone
    values, metrics, weights = ranks[1].run(before_and_after, job)[0]
    assert values.std() > 0.1
    for name, layout in LAYOUTS.items():
        (said, found, learnt), (others, *_) = ranks[2].run(before_and_after, job.under(layout))
        assert torch.equal(said, values) and torch.equal(others, values), name
        for metric in ("critic/vf_loss", "critic/grad_norm", "critic/return_mean"):
            assert found[metric] == pytest.approx(metrics[metric], rel=1e-5), (name, metric)
        assert learnt.keys() == weights.keys()
        for tensor in weights:
            torch.testing.assert_close(learnt[tensor], weights[tensor], rtol=0, atol=5e-7)
