import pytest
import torch

from onpolicy.config.groups import TrainerConfig
from onpolicy.train.optimizer import make_optimizer, make_schedule


def rates(steps, **config):
    settings = TrainerConfig(lr=1.0, **config)
    optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(1))], settings)
    schedule = make_schedule(optimizer, settings, steps)
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_warm_up_then_the_chosen_shape(style, expected):
    assert rates(6, lr_warmup_steps=2, lr_decay_style=style) == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates(3) == [1.0, 1.0, 1.0]
