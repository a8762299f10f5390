"""A trainer's memory that leaves its device and comes back, on a CPU by the code that a GPU runs.

No GPU has run this: whether pages are pinned and CUDA's allocator gives memory back is not seen here.
"""

import pytest
import torch

from onpolicy.training.offload import Offload
from tests.onpolicy.training.fsdp.test_trainer import RATES, make, make_samples, weights

__all__ = ["make"]


def test_views_of_one_storage_come_back_bit_for_bit():
    whole = torch.randn(10, 7)
    rows, flat, want = whole[3:5], whole.view(-1)[8:20], whole.clone()
    parameter = torch.nn.Parameter(torch.randn(4))
    kept = parameter.detach().clone()
    offload = Offload()
    for _ in range(2):
        offload.take([rows, flat, parameter])
        assert whole.untyped_storage().nbytes() == parameter.untyped_storage().nbytes() == 0
        offload.bring_back()
        assert torch.equal(whole, want) and torch.equal(rows, want[3:5])
        assert torch.equal(flat, want.view(-1)[8:20]) and torch.equal(parameter, kept)


def test_what_is_away_stays_away_and_what_is_dropped_comes_back_as_memory():
    needed, dropped = torch.randn(3), torch.randn(5)
    want, offload = needed.clone(), Offload()
    offload.take([needed], dropped=[dropped])
    offload.take([needed], dropped=[dropped])
    assert needed.untyped_storage().nbytes() == dropped.untyped_storage().nbytes() == 0
    offload.bring_back()
    assert torch.equal(needed, want) and dropped.untyped_storage().nbytes() == 20


@pytest.mark.parametrize("algorithm", [{}, {"use_kl_loss": True, "kl_loss_coef": 0.5}])
def test_a_trainer_that_left_its_device_learns_the_same_bits(make, tmp_path, algorithm):
    stays, leaves = make(algorithm=algorithm), make(algorithm=algorithm)
    for step in range(3):
        samples = make_samples(stays, seed=step)
        ours, theirs = (trainer.train(samples, step, RATES) for trainer in (stays, leaves))
        assert ours.metrics["train/loss"] == theirs.metrics["train/loss"]
        leaves.release_memory("state")
        policy = leaves.policy
        assert all(x.untyped_storage().nbytes() == 0 for x in local(policy.optimizer_tensors()))
        assert all(x.untyped_storage().nbytes() for x in local(policy.module.parameters()))
        leaves.release_memory("weights")
        for model in leaves.models.values():
            assert all(x.untyped_storage().nbytes() == 0 for x in local(model.module.parameters()))
        assert policy.optimizer_tensors()
    samples = make_samples(leaves)  # scores, which brings the weights back and nothing else
    assert local(leaves.policy.optimizer_tensors())[0].untyped_storage().nbytes() == 0
    leaves.save(tmp_path)  # and this all of it
    resumed = make(algorithm=algorithm)
    resumed.load(tmp_path)
    for trainer in (stays, leaves, resumed):
        trainer.train(samples, 3, RATES)
        assert all(torch.equal(weights(stays)[name], x) for name, x in weights(trainer).items())


def local(tensors):
    return [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
