"""The coefficient of the entropy bonus: Skywork-OR1's control, step by step."""

import pytest

from onpolicy.config.groups import AlgorithmConfig
from onpolicy.train.entropy import EntropyBonus

ADAPTIVE = AlgorithmConfig(entropy_ctrl="adaptive", entropy_target=0.3, entropy_coef_delta=0.01)


def test_it_rises_while_entropy_is_at_most_the_target_and_falls_silent_above():
    bonus = EntropyBonus(ADAPTIVE)
    entropies = (0.2, 0.3, 0.4, 0.1, 0.5, 0.5, 0.5, 0.2, 0.2)
    applied = [bonus.step(entropy)["train/entropy_coef"] for entropy in entropies]
    assert applied == pytest.approx([0.0, 0.01, 0.02, 0.0, 0.02, 0.0, 0.0, 0.0, 0.01])


def test_a_checkpoint_goes_on_where_it_was():
    bonus, again = EntropyBonus(ADAPTIVE), EntropyBonus(ADAPTIVE)
    for entropy in (0.1, 0.1, 0.9):
        bonus.step(entropy)
    again.load_state_dict(bonus.state_dict())
    assert again.coef == 0 and (again.step(0.1), again.coef) == (bonus.step(0.1), bonus.coef)
    assert again.coef == pytest.approx(0.02)


def test_a_fixed_coefficient_stays_and_is_no_state():
    bonus = EntropyBonus(AlgorithmConfig(entropy_coef=0.5))
    assert bonus.step(9.0) == bonus.state_dict() == {} and bonus.coef == 0.5
