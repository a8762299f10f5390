"""A trainer that computes with rounded weights, and the masters that it moves."""

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.models.policy import PackedTokens
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.training.fsdp import fsdp_optimizer as masters_module
from onpolicy.training.fsdp.fsdp_optimizer import Masters
from onpolicy.training.fsdp.sharding import gather_buckets
from onpolicy.weights import rounding
from onpolicy.weights.rounding import dequantise, quantise, round_weight
from tests.support.megatron_training import Job, equal, make, make_samples, weights
from tests.support.rounded import deployed
from tests.support.samples import make_train_sample
from tests.support.tiny import make_checkpoint

RATES = [1e-3]
PUSHED = torch.bfloat16


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


def job(path, weight_format="int3", dtype="bfloat16", **changes):
    changes = {"engine": {"rollout_weight_format": weight_format}, **changes}
    return Job(path=path, backend="fsdp", dtype=dtype, changes=changes)


def masters(trainer):
    """By Hugging Face names, in float32."""
    policy = trainer.policy
    held = policy.masters.beside
    buckets = gather_buckets(policy.module, torch.float32, 1 << 30, masters=held)
    return {name: tensor for bucket in buckets for name, tensor in bucket}


@pytest.mark.parametrize("model", ["checkpoint", "mixture"])
def test_what_is_pushed_are_the_rounded_masters_of_now(request, model):
    path = request.getfixturevalue(model)
    trainer = make(job(path))
    before = masters(trainer)
    reader = CheckpointReader(str(path))
    assert all(torch.equal(x, reader.read(name, ()).float()) for name, x in before.items())
    pushed = weights(trainer)
    assert equal(pushed, deployed(before))
    changed = [name for name in pushed if not torch.equal(pushed[name], before[name].to(PUSHED))]
    assert all(name.endswith("_proj.weight") for name in changed)
    assert ("mlp.experts.0.up_proj" in str(changed)) == (model == "mixture")

    metrics = trainer.train(make_samples(trainer), 0, RATES).metrics
    assert metrics["parity/num_mismatched_tokens"] == 0 < metrics["parity/num_compared_tokens"]
    after = masters(trainer)
    assert equal(weights(trainer), deployed(after))
    assert not equal(weights(trainer), deployed(before))
    # Float32 masters would be rounded to other numbers than what is pushed of them.
    assert not equal(weights(trainer), deployed(after, dtype=torch.float32))


def test_rounded_weights_of_before_a_step_are_noticed(checkpoint, monkeypatch):
    trainer = make(job(checkpoint))
    samples = make_samples(trainer)
    monkeypatch.setattr(Masters, "round", lambda self: None)
    trainer.train(samples, 0, RATES)
    assert not equal(weights(trainer), deployed(masters(trainer)))


def test_a_master_gets_the_gradient_of_its_rounded_weight(checkpoint):
    """Straight-through: by finite differences of the rounded weight, which is not rounded again."""
    policy = make(job(checkpoint, dtype="float32")).policy
    packed = PackedTokens.after_prompts([[5, 9, 3, 8, 6, 2, 7]], [2], 1.0)
    policy.module(packed).log_probs.sum().backward()
    policy.masters.take_gradients()
    name = next(name for name in policy.masters.beside if "layers.1.mlp.down_proj" in name)
    rounded, master = dict(policy.module.named_parameters())[name], policy.masters.beside[name]
    assert not torch.equal(rounded.full_tensor(), master.full_tensor())
    gradient = master.grad.full_tensor()
    place = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    kept, step, found = float(rounded.to_local()[place]), 2**-7, []
    for way in (step, -step):
        with torch.no_grad():
            rounded.to_local()[place] = kept + way
        found.append(float(policy.score([packed])[0].log_probs.double().sum()))
    slope = (found[0] - found[1]) / (2 * step)
    assert slope == pytest.approx(float(gradient[place]), rel=1e-3)


def test_a_checkpoint_has_the_masters_and_a_run_goes_on_with_its_bits(checkpoint, tmp_path):
    trainer = make(job(checkpoint))
    trainer.train(make_samples(trainer), 0, RATES)
    trainer.save(tmp_path / "state")
    (tmp_path / "hf").parent.mkdir(exist_ok=True)
    trainer.export(tmp_path / "hf")
    held = masters(trainer)
    reader = CheckpointReader(str(tmp_path / "hf"))
    for name, master in held.items():
        assert torch.equal(reader.read(name, ()), master.to(PUSHED))

    other = make(job(checkpoint))
    assert not equal(masters(other), held)
    other.load(tmp_path / "state")
    assert equal(masters(other), held) and equal(weights(other), weights(trainer))
    for each in (trainer, other):
        each.train(make_samples(each, seed=1), 1, RATES)
    assert equal(masters(other), masters(trainer)) and equal(weights(other), weights(trainer))


def test_the_reference_is_rounded_as_the_policy_is(checkpoint):
    trainer = make(job(checkpoint, algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1}))
    assert trainer.train(make_samples(trainer), 0, RATES).metrics["train/kl_loss"] == 0
    assert not trainer.models["reference"].masters.beside


def with_adapters(path, **changes):
    lora = {"lora_rank": 4, "lora_target_modules": "q_proj,down_proj"}
    return job(path, "int4", lora=lora, **changes)


def test_a_base_beside_adapters_is_rounded_once_and_they_are_not(checkpoint, tmp_path):
    """And a run goes on with its bits from a checkpoint that has no base."""
    trainer, plain = make(with_adapters(checkpoint)), make(job(checkpoint, "int4"))
    base, frozen, samples = weights(plain), trainer.policy.frozen_digest(), make_samples(trainer)
    assert not trainer.policy.masters.beside and frozen
    of_base = [s.rollout_log_probs for s in make_samples(plain)]
    assert [s.rollout_log_probs for s in samples] == of_base
    assert trainer.train(samples, 0, RATES).metrics["parity/num_mismatched_tokens"] == 0
    trainer.save(tmp_path / "state")
    other = make(with_adapters(checkpoint))
    other.load(tmp_path / "state")
    for each in (trainer, other):
        each.train(make_samples(each, seed=1), 1, RATES)
    pushed = weights(trainer)
    assert equal(weights(other), pushed) and trainer.policy.frozen_digest() == frozen
    assert equal({name: pushed[name] for name in base}, base)
    exact = {name: x.to(PUSHED) for name, x in masters(trainer).items() if name not in base}
    assert all(x.any() and not torch.equal(round_weight(x, "int4"), x) for x in exact.values())
    assert equal({name: pushed[name] for name in exact}, exact)


def test_adapters_that_are_rounded_are_noticed(checkpoint, monkeypatch):
    monkeypatch.setattr(rounding, "KEPT", rounding.KEPT[:-1])
    assert make(with_adapters(checkpoint)).policy.masters.beside


def test_the_reference_of_adapters_is_the_rounded_base(checkpoint):
    trainer = make(with_adapters(checkpoint, algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1}))
    first, later = (
        trainer.train(make_samples(trainer), step, RATES).metrics["train/kl_loss"]
        for step in (0, 1)
    )
    assert first == 0 < later


def test_one_scale_that_is_off_by_an_ulp_is_a_mismatch(checkpoint, monkeypatch):
    trainer, off = make(job(checkpoint, dtype="float32")), []
    samples = make_samples(trainer)

    def one_off(weight, weight_format):
        numbers, scale = quantise(weight, weight_format)
        if not off:
            off.append(scale[0, 0].clone())
            scale[0, 0] = torch.nextafter(off[0], torch.tensor(torch.inf))
        return dequantise(numbers, scale, weight_format, weight.dtype)

    monkeypatch.setattr(masters_module, "round_weight", one_off)
    trainer.policy.masters.round()
    with pytest.raises(ParityError):
        trainer.train(samples, 0, RATES)
    assert off


PROMPT, VOCAB = [5, 9, 3], 137


def answers(trainer, mu=None, b=1.0):
    """Every answer of one token, with b mu(answer) for a reward: their mean is an expectation."""
    sequences = [[*PROMPT, token] for token in range(VOCAB)]
    log_probs = trainer.log_probs(sequences, [len(PROMPT)] * VOCAB, 1.0)
    mu = torch.cat(log_probs).exp() if mu is None else mu
    return mu, [
        make_train_sample(sequence, len(PROMPT), own.tolist(), b * float(weight), i)
        for i, (sequence, own, weight) in enumerate(zip(sequences, log_probs, mu, strict=True))
    ]


@pytest.mark.parametrize("both", [True, False])
def test_a_constant_reward_teaches_nothing_if_what_learns_is_what_samples(checkpoint, both):
    """The drift b (mu - pi) of docs/collapse.md, by enumeration through a run's own step: 0 to the
    rounding of sums where both engines round, and not where the rollout alone does."""
    rounded = make(job(checkpoint, dtype="float32"))
    mu, _ = answers(rounded)
    trainer = rounded if both else make(job(checkpoint, "", dtype="float32"))
    for b in (-0.5, 2.0):
        _, samples = answers(trainer, mu, b)
        metrics = trainer.train(samples, 0, [0.0]).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
        assert (metrics["train/grad_norm"] < 1e-6 * abs(b)) == both
        assert (metrics["train/grad_norm"] > 1e-3 * abs(b)) != both
