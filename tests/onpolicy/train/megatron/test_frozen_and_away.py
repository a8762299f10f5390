"""Megatron's engine with parameters that are not trained, and with its memory off the device."""

from functools import partial

import pytest
import torch

from tests.onpolicy.train.megatron.test_trainer import (
    LAYOUTS,
    SMOOTH,
    alone,
    job,
    ranks,
    require_same_steps,
)
from tests.support.megatron_training import Job, equal, train, train_with_frozen

__all__ = ["alone", "job", "ranks"]

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["data", "data, whole optimizer", "tensor"])
def test_a_trainer_that_left_its_device_learns_the_same_bits(ranks, checkpoint, layout, dtype):
    job = Job(path=checkpoint, dtype=dtype).under(LAYOUTS[layout])
    (stays, *_), (leaves, *_) = (ranks.run(train, job, 3, None, None, 1, x) for x in (False, True))
    assert leaves[0] == stays[0]
    for ours, theirs in zip(leaves[1], stays[1], strict=True):
        assert ours["train/loss"] == theirs["train/loss"]
        assert ours["train/grad_norm"] == theirs["train/grad_norm"]
    assert equal(leaves[2], stays[2])


def is_frozen(name):
    return "layers.0.mlp.gate_proj" in name or "layers.0.mlp.up_proj" in name or "embed" in name


@pytest.fixture(scope="module")
def reference(checkpoint):
    """The other engine's, on one rank."""
    return train_with_frozen(Job(path=checkpoint, backend="fsdp", changes=SMOOTH))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_only_what_is_trained_moves_and_as_in_the_other_engine(
    ranks, job, reference, layout
):
    under = job.under(LAYOUTS[layout], **SMOOTH)
    before = ranks.run(train, under, 0)[0][2]
    results = ranks.run(train_with_frozen, under)
    require_same_steps(results[0][:3], reference[:3])
    after = results[0][2]
    assert any(map(is_frozen, before)) and before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == is_frozen(name), name
    for *_, digests in results:
        assert len(digests) == 4 and len(set(digests)) == 1


def test_it_goes_on_with_the_same_bits_where_a_weight_is_frozen_in_some_layers_only(
    ranks, job, tmp_path
):
    under = job.under(LAYOUTS["pipeline"], **SMOOTH)
    whole = ranks.run(partial(train_with_frozen, save=tmp_path), under)[0]
    resumed = ranks.run(partial(train_with_frozen, load=tmp_path), under)[0]
    assert resumed[0] == whole[0][1:]
    assert equal(resumed[2], whole[2])
