"""A trainer with inputs of linears in FP8, and a scale that is an ulp off."""

import pytest
import torch

from onpolicy.errors import ParityError
from onpolicy.models import rounded_inputs
from onpolicy.ops.hopper import gemm
from onpolicy.training import policy_trainer
from tests.support.bytes_on_cpu import FORMATS, SIZES, BytesOnCpu, stand_in
from tests.support.megatron_training import Job, make, make_samples, weights
from tests.support.tiny import make_checkpoint


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


def test_one_input_whose_scale_is_off_by_an_ulp_is_a_mismatch(checkpoint, monkeypatch):
    def one_off(rounded):
        rounded[0] = torch.nextafter(rounded[0], 2 * rounded[0])  # of a first token
        return rounded

    trainer = trainer_of(checkpoint, rollout_activation_format="fp8_e4m3")
    require_mismatch(trainer, monkeypatch, rounded_inputs, "round_weight", one_off)


def test_activations_that_are_computed_again_are_rounded_alike(checkpoint):
    def step(**trainer):
        changes = {"engine": {"rollout_activation_format": "fp8_e4m3"}, "trainer": trainer}
        made = make(Job(path=checkpoint, backend="fsdp", changes=changes))
        made.train(make_samples(made), 0, [0.0])
        return weights(made)

    kept, again = step(), step(activation_checkpointing=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", **SIZES)


@pytest.fixture
def make_of_bytes(whole_blocks, monkeypatch):
    """Makes trainers whose linears multiply bytes."""
    stand_in(monkeypatch)
    checked = BytesOnCpu(), {}
    monkeypatch.setattr(policy_trainer, "checked_operators", lambda *_: checked)

    def make_one(backend, **trainer):
        changes = {"engine": FORMATS, "trainer": trainer}
        return make(Job(path=whole_blocks, backend=backend, dtype="bfloat16", changes=changes))

    return make_one


def test_both_trainers_multiply_the_same_bytes_and_those_of_their_weights_after_a_step(
    make_of_bytes, whole_blocks, monkeypatch
):
    log_probs = []
    for backend in ("fsdp", "megatron"):
        trainer, steps = make_of_bytes(backend), []
        for step in range(2):
            samples = make_samples(trainer)
            metrics = trainer.train(samples, step, [1e-3]).metrics
            assert metrics["parity/num_mismatched_tokens"] == 0
            assert metrics["parity/num_compared_tokens"] > 0
            steps.append([s.rollout_log_probs for s in samples])
        assert steps[0] != steps[1]
        log_probs.append(steps[0])
    assert log_probs[0] == log_probs[1]
    monkeypatch.undo()
    job = Job(path=whole_blocks, backend="fsdp", dtype="bfloat16", changes={"engine": FORMATS})
    in_bfloat16 = make(job)
    assert [s.rollout_log_probs for s in make_samples(in_bfloat16)] != log_probs[0]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_two_rows_with_each_others_scales_are_a_mismatch(make_of_bytes, monkeypatch, backend):
    trainer = make_of_bytes(backend)
    samples, right = make_samples(trainer), gemm.input_in_bytes

    def swapped(x):
        made = right(x)
        made.scales[[0, 1]] = made.scales[[1, 0]]
        return made

    monkeypatch.setattr(gemm, "input_in_bytes", swapped)
    with pytest.raises(ParityError):
        trainer.train(samples, 0, [0.0])


def test_activations_of_bytes_that_are_computed_again_are_alike(make_of_bytes):
    def step(**trainer):
        made = make_of_bytes("fsdp", **trainer)
        made.train(make_samples(made), 0, [1e-3])
        return weights(made)

    kept, again = step(), step(activation_checkpointing=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
