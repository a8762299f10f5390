"""A parameter that asks for no gradient is computed with, pushed and saved, and never moves."""

import pytest
import torch

from onpolicy.models.size import trainable_parameters
from onpolicy.training.fsdp import fsdp_model
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, make_samples, weights

__all__ = ["make"]

FROZEN = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight")


@pytest.fixture
def frozen(make, monkeypatch):
    """A trainer some of whose parameters are frozen when its model is loaded."""
    load = fsdp_model.load_sharded_policy

    def load_and_freeze(*args, **kwargs):
        module = load(*args, **kwargs)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.endswith(FROZEN))
        return module

    monkeypatch.setattr(fsdp_model, "load_sharded_policy", load_and_freeze)
    return make


def is_frozen(name):
    return name.endswith(FROZEN)


def test_only_trainable_parameters_move_and_have_optimizer_state(frozen):
    trainer = frozen()
    before = weights(trainer)
    trainer.train(make_samples(trainer), 0, RATES)
    after = weights(trainer)
    assert any(map(is_frozen, before)) and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == is_frozen(name), name
    module, state = trainer.policy.module, trainer.policy.optimizer.state
    named = dict(module.named_parameters())
    assert {name for name, p in named.items() if p in state} == {
        name for name in named if not is_frozen(name)
    }
    assert len(trainable_parameters(module)) == len(state)


def test_the_parameters_that_are_trained_get_the_bits_they_get_beside_frozen_ones(frozen, tmp_path):
    """A checkpoint goes on with the same bits, whose optimizer knows the trained ones alone."""
    whole, first, second = frozen(), frozen(), frozen()
    for trainer in (whole, first):
        trainer.train(make_samples(trainer), 0, RATES)
    first.save(tmp_path)
    second.load(tmp_path)
    for trainer in (whole, second):
        trainer.train(make_samples(trainer, seed=1), 1, RATES)
    assert all(torch.equal(weights(whole)[name], x) for name, x in weights(second).items())


def test_weights_go_in_two_parts_that_are_all_of_them(frozen):
    """A part's names are a checkpoint's; those of one part are never in the other."""
    policy = frozen().policy
    parts = {
        part: {name: x for bucket in policy.weight_buckets(20_000, part) for name, x in bucket}
        for part in ("all", "trained", "frozen")
    }
    assert parts["frozen"] and all(map(is_frozen, parts["frozen"]))
    assert not any(map(is_frozen, parts["trained"]))
    together = parts["frozen"] | parts["trained"]
    assert together.keys() == parts["all"].keys()
    assert all(torch.equal(tensor, parts["all"][name]) for name, tensor in together.items())


def test_a_frozen_bit_that_changes_is_another_digest_and_a_step_changes_none(frozen, make):
    trainer = frozen()
    before = trainer.policy.frozen_digest()
    trainer.train(make_samples(trainer), 0, RATES)
    assert before and trainer.policy.frozen_digest() == before
    name, parameter = next(
        (name, p) for name, p in trainer.policy.module.named_parameters() if is_frozen(name)
    )
    with torch.no_grad():
        parameter.to_local().view(torch.int32)[0, 0] ^= 1
    assert trainer.policy.frozen_digest() != before, name


def test_where_all_is_trained_nothing_is_frozen(make):
    policy = make().policy
    assert policy.frozen_digest() == ""
    assert list(policy.weight_buckets(20_000, "frozen")) == []
    for ours, theirs in zip(
        policy.weight_buckets(20_000, "trained"), policy.weight_buckets(20_000), strict=True
    ):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_the_reference_is_not_trained(make):
    trainer = make(algorithm={"use_kl_loss": True, "kl_loss_coef": 0.5})
    reference = trainer.models["reference"]
    assert reference.optimizer is None and not trainable_parameters(reference.module)
    assert trainable_parameters(trainer.policy.module) == [*trainer.policy.module.parameters()]
