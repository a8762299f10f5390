"""A trainer with keys and values, or inputs of linears, in 8 bits, and a scale that is an ulp off."""

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.models import kv_cache, rounded_inputs
from tests.support.megatron_training import Job, make, make_samples, weights


def trainer_of(checkpoint, **engine):
    changes = {"engine": engine, "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1}}
    return make(Job(path=checkpoint, backend="fsdp", changes=changes))


def require_mismatch(trainer, monkeypatch, module, rounding, wrong):
    """Nothing differs, the reference neither, which is rounded too; and tokens do where `wrong` changes
    what `rounding` of `module` gives.
    """
    samples, right = make_samples(trainer), getattr(module, rounding)
    metrics = trainer.train(samples, 0, [0.0]).metrics
    assert metrics["parity/num_mismatched_tokens"] == 0 < metrics["parity/num_compared_tokens"]
    assert metrics["train/kl_loss"] == 0
    monkeypatch.setattr(module, rounding, lambda rows, name: wrong(right(rows, name)))
    with pytest.raises(ParityError):
        trainer.train(samples, 0, [0.0])


@pytest.mark.parametrize("kv_format", kv_cache.NUMBERS)
def test_one_scale_that_is_off_by_an_ulp_is_a_mismatch(checkpoint, monkeypatch, kv_format):
    def one_off(quantised):
        numbers, scale = quantised
        scale[0] = torch.nextafter(scale[0], torch.tensor(torch.inf))  # of a first token
        return numbers, scale

    trainer = trainer_of(checkpoint, rollout_kv_format=kv_format)
    require_mismatch(trainer, monkeypatch, kv_cache, "quantise", one_off)


@pytest.mark.parametrize("activation_format", ["int8", "fp8_e4m3"])
def test_one_input_whose_scale_is_off_by_an_ulp_is_a_mismatch(
    checkpoint, monkeypatch, activation_format
):
    def one_off(rounded):
        rounded[0] = torch.nextafter(rounded[0], 2 * rounded[0])  # of a first token
        return rounded

    trainer = trainer_of(checkpoint, rollout_activation_format=activation_format)
    require_mismatch(trainer, monkeypatch, rounded_inputs, "round_weight", one_off)


def test_activations_that_are_computed_again_are_rounded_alike(checkpoint):
    def step(**trainer):
        changes = {"engine": {"rollout_activation_format": "fp8_e4m3"}, "trainer": trainer}
        made = make(Job(path=checkpoint, backend="fsdp", changes=changes))
        made.train(make_samples(made), 0, [0.0])
        return weights(made)

    kept, again = step(), step(activation_checkpointing=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_whoever_rounds_no_keys_computes_other_log_probs(checkpoint):
    rounded, whole = trainer_of(checkpoint, rollout_kv_format="int8"), trainer_of(checkpoint)
    log_probs = [[s.sample.rollout_log_probs for s in make_samples(x)] for x in (rounded, whole)]
    assert log_probs[0] != log_probs[1]
