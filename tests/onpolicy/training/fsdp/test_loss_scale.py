"""The loss's scale in float16: what is skipped, what is kept, and that it changes no other bit."""

import json
import math

import pytest
import torch

from onpolicy.errors import CheckpointError, TrainingError
from onpolicy.training import loss_scale
from onpolicy.training.loss_scale import LossScale
from tests.onpolicy.training.fsdp.test_trainer import RATES, make_samples, maker_of, weights


@pytest.fixture
def make(checkpoint):
    return maker_of(checkpoint)


def state(trainer):
    """Weights and optimizer state, which a skipped step must leave alone."""
    return [*weights(trainer).values(), *(x.clone() for x in trainer.policy.optimizer_tensors())]


def test_the_scale_moves_as_pytorchs_scaler_does(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    for is_finite in map(bool, (1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0)):
        assert theirs.scale(torch.ones(1)).item() == ours.value
        parameter.grad = torch.tensor([1.0 if is_finite else math.inf])
        theirs.step(optimizer)
        theirs.update()
        ours.take(is_finite)
    assert theirs.get_scale() == ours.value == 2.0**15
    assert theirs.state_dict()["_growth_tracker"] == ours.good_steps == 0


def trained(make, scale=None):
    """(metrics, weights) after two steps in float32, the gradients of which any scale fits."""
    trainer = make(trainer={"clip_grad": 0.1, "max_tokens_per_gpu": 100})
    if scale is not None:
        trainer.policy.loss_scale = LossScale()
        trainer.policy.loss_scale.value = scale
    found = trainer.train(make_samples(trainer), 0, [1e-3, 2e-3]).metrics
    of_scale = {name: found.pop(name, None) for name in ("train/loss_scale", "train/skipped_share")}
    told = {name: x for name, x in found.items() if not name.startswith("perf/")}
    return told, weights(trainer), of_scale


def same(a, b):
    return a[0] == b[0] and all(torch.equal(a[1][name], x) for name, x in b[1].items())


def test_a_power_of_two_changes_no_bit_of_norm_clipping_and_weights(make):
    """Gradients that are clipped, or measured, while they are scaled would have other norms, as in
    issue 1196 of pytorch/examples."""
    plain, scaled = trained(make), trained(make, 2.0**16)
    assert plain[0]["train/grad_norm"] > 0.1  # so they are clipped
    assert same(plain, scaled)
    assert scaled[2] == {"train/loss_scale": 2.0**16, "train/skipped_share": 0}
    assert not same(plain, trained(make, 3.0))  # so the test would notice


def test_a_scale_keeps_gradients_that_float16_cannot_hold(make):
    found = {}
    for dtype, scale in (("float32", 1.0), ("float16", 1.0), ("float16", 2.0**16)):
        trainer = make(dtype)
        samples = make_samples(trainer)
        for sample in samples:
            sample.reward *= 1e-6
        if trainer.policy.loss_scale is not None:
            trainer.policy.loss_scale.value = scale
        found[dtype, scale] = trainer.train(samples, 0, RATES).metrics["train/grad_norm"]
    exact, lost, kept = found.values()
    assert kept == pytest.approx(exact, rel=0.02) and lost < 0.9 * exact


def test_a_step_that_overflows_is_skipped_and_the_next_one_has_half_the_scale(make, caplog):
    trainer = make("float16")
    trainer.train(make_samples(trainer), 0, RATES)
    before, scale = state(trainer), trainer.policy.loss_scale
    scale.value, scale.good_steps = 2.0**40, 7
    metrics = trainer.train(make_samples(trainer), 1, RATES).metrics
    assert metrics["train/skipped_share"] == 1 and metrics["train/lr"] == 0
    assert metrics["train/loss_scale"] == 2.0**40 and not math.isfinite(metrics["train/grad_norm"])
    assert math.isfinite(metrics["train/loss"])
    assert all(map(torch.equal, state(trainer), before))
    assert (scale.value, scale.good_steps) == (2.0**39, 0)
    assert "overflowed float16 at loss scale 1.09951e+12" in caplog.text
    scale.value = 2.0**10
    metrics = trainer.train(make_samples(trainer), 2, RATES).metrics  # no gradient was left over
    assert metrics["train/skipped_share"] == 0 and metrics["train/grad_norm"] < 100
    assert not torch.equal(state(trainer)[0], before[0])


def test_a_run_ends_where_no_smaller_scale_would_help(make):
    """As those of issues 512 and 515 of facebookresearch/fairseq, whose scale fell on and on."""
    for value, reward in ((1.0, 1e9), (2.0**16, math.inf)):
        trainer = make("float16")
        trainer.policy.loss_scale.value = value
        samples = make_samples(trainer)
        samples[0].reward = reward
        before = state(trainer)
        with pytest.raises(TrainingError, match=r"grad_norm=.*choose --dtype bfloat16"):
            trainer.train(samples, 0, RATES)
        assert all(map(torch.equal, state(trainer), before))


def test_a_resumed_run_has_the_scale_and_its_count_of_good_steps(make, tmp_path, monkeypatch):
    """Which issue 4289 of huggingface/accelerate lost. The scale doubles one step after the load."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    trainer, resumed = make("float16"), make("float16")
    trainer.policy.loss_scale.value = 2.0**10
    trainer.train(make_samples(trainer), 0, RATES)
    trainer.save(tmp_path)
    resumed.load(tmp_path)
    assert vars(resumed.policy.loss_scale) == {"value": 2.0**10, "good_steps": 1}
    for one in (trainer, resumed):
        one.train(make_samples(one, seed=1), 1, RATES)
        assert vars(one.policy.loss_scale) == {"value": 2.0**11, "good_steps": 0}
    assert all(map(torch.equal, state(trainer), state(resumed)))


@pytest.mark.parametrize(
    "saved", [{"value": 3.0, "good_steps": 0}, {"value": 2.0, "good_steps": 2000}, {}, 7]
)
def test_a_scale_that_no_run_has_had_is_refused(make, tmp_path, saved):
    trainer = make("float16")
    trainer.save(tmp_path)
    file = tmp_path / "numbers.json"
    numbers = json.loads(file.read_text())
    file.write_text(json.dumps({**numbers, "loss_scale": {"policy": saved}}))
    with pytest.raises(CheckpointError, match=r"loss_scale=.*power of two"):
        trainer.load(tmp_path)


def test_without_float16_nothing_is_scaled_or_saved(make):
    trainer = make("bfloat16")
    assert trainer.policy.scale == 1.0 and [*trainer.learner.state_dict()] == ["corrections"]
