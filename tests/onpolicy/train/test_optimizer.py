import pytest
import torch

from fallback_correction.length_decay import LengthDecaySchedule
from onpolicy.config import TrainConfig, groups
from onpolicy.config.flags import with_flags
from onpolicy.train.optimizer import make_optimizer, make_schedule


def make(steps, **flags):
    """A schedule of one optimizer step per rollout."""
    config = TrainConfig(
        rollout=groups.RolloutConfig(num_rollout=steps),
        trainer=with_flags(groups.TrainerConfig(lr=1.0), flags),
    )
    optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(1))], config.trainer)
    return optimizer, make_schedule(optimizer, config)


def rates(steps, **flags):
    optimizer, schedule = make(steps, **flags)
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


@pytest.mark.parametrize("flags", [{}, {"lr_schedule": "length-decay", "length_decay_period": 2}])
@pytest.mark.parametrize("done", range(7))
def test_a_schedule_resumes_where_it_was(flags, done):
    def advance(optimizer, schedule, steps):
        for _ in range(steps):
            if isinstance(schedule, LengthDecaySchedule):
                schedule.observe(100.0)
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()

    flags = {"lr_warmup_steps": 2, "lr_decay_style": "cosine", **flags}
    whole = list(advance(*make(7, **flags), 7))
    first, second = make(7, **flags), make(7, **flags)
    list(advance(*first, done))
    second[1].load_state_dict(first[1].state_dict())
    assert list(advance(*second, 7 - done)) == whole[done:]


def test_length_decay_halves_the_rate_of_the_base_schedule():
    optimizer, schedule = make(5, lr_schedule="length-decay", length_decay_period=2)
    seen = []
    for _ in range(5):
        schedule.observe(100.0)
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == [1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("flags", "period"),
    [
        ({}, 160),
        ({"length_decay_default_period": 50}, 50),
        ({"length_decay_default_period": 0}, None),
    ],
)
def test_without_a_surge_the_default_period_is_the_flags(flags, period):
    _, schedule = make(5, lr_schedule="length-decay", **flags)
    for _ in range(200):
        schedule.observe(100.0)
    assert schedule.decay.period == period


def test_another_learning_rate_at_resume_takes_over():
    first, second = make(5, lr_warmup_steps=4), make(5, lr_warmup_steps=4)
    for group in second[0].param_groups:
        group["initial_lr"] = 3.0
    second[1].base_lrs = [3.0]
    first[1].step()
    second[1].load_state_dict(first[1].state_dict())
    assert second[1].get_last_lr() == [1.5]
