"""The entropy bonus and the control of its coefficient have the numbers that TRL's own code gave."""

import json
from pathlib import Path

import pytest
import torch

from onpolicy.config.groups import AlgorithmConfig
from onpolicy.train.entropy import EntropyBonus
from onpolicy.train.loss import LossSettings, policy_loss
from tests.support.onpolicy_batches import make_batch

PEERS = json.loads((Path(__file__).parents[2] / "data/peer_losses.json").read_text())
CASE = PEERS["entropy_controller"]
ADAPTIVE = AlgorithmConfig(
    entropy_ctrl="adaptive",
    entropy_coef=CASE["entropy_coef"],
    entropy_target=CASE["entropy_target"],
    entropy_coef_delta=CASE["entropy_coef_delta"],
    entropy_coef_max=CASE["entropy_coef_max"],
)


def packed(rows):
    return torch.tensor([x for row in rows for x in row])


def test_the_bonus_and_its_gradient_are_trls():
    case, entropy = PEERS["entropy_bonus"], packed(PEERS["inputs"]["entropy"]).requires_grad_()
    batch = make_batch([1.0] * len(entropy), [0.0] * len(entropy))
    loss, _ = policy_loss(*batch, LossSettings(entropy_coef=case["entropy_coef"]), entropy)
    (without,) = (c["loss"] for c in PEERS["objectives"] if c["name"] == "trl bnpo")
    assert loss.item() == pytest.approx(case["loss"] - without, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, entropy)
    assert gradient.tolist() == pytest.approx(
        packed(case["gradient_of_entropy"]).tolist(), abs=1e-6
    )


def test_the_coefficient_moves_as_trls_and_goes_on_from_a_checkpoint():
    bonus = EntropyBonus(ADAPTIVE)
    for entropy, applied, value in zip(
        CASE["entropies"], CASE["applied"], CASE["values"], strict=True
    ):
        assert bonus.step(entropy) == {"train/entropy_coef": pytest.approx(applied, abs=1e-6)}
        state = bonus.state_dict()
        assert state["coef"] == pytest.approx(value, abs=1e-6)
        bonus = EntropyBonus(ADAPTIVE)
        bonus.load_state_dict(state)


def test_a_fixed_coefficient_stays_and_is_no_state():
    bonus = EntropyBonus(AlgorithmConfig(entropy_coef=0.5))
    assert bonus.step(9.0) == bonus.state_dict() == {} and bonus.coef == 0.5
