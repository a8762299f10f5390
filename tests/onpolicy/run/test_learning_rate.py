"""The learning rate of every optimizer step of a run."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from fallback_correction.length_decay import LengthDecay, LengthDecaySchedule
from onpolicy.config import TrainConfig, groups
from onpolicy.config.flags import with_flags
from onpolicy.errors import ConfigError
from onpolicy.run.learning_rate import LearningRate, base_factor

DECAYS = {"lr_schedule": "length-decay", "length_decay_period": 2}


def make_config(steps, **flags):
    """One optimizer step per rollout."""
    return TrainConfig(
        rollout=groups.RolloutConfig(num_rollout=steps),
        trainer=with_flags(groups.TrainerConfig(lr=1.0), flags),
    )


def make(steps, **flags):
    return LearningRate(make_config(steps, **flags))


def advance(rate, rollouts, governor=1.0):
    for _ in range(rollouts):
        rate.observe(100.0, 0.0)
        yield from rate.next_rates(1, governor)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_warm_up_then_the_chosen_shape(style, expected):
    rate = make(6, lr_warmup_steps=2, lr_decay_style=style)
    assert rate.next_rates(6, 1.0) == pytest.approx(expected, abs=1e-6)


def test_a_rollout_without_optimizer_steps_moves_the_decay_and_not_the_base():
    rate = make(9, lr_warmup_steps=4, **DECAYS)
    assert rate.next_rates(1, 1.0) == [0.25]
    rate.observe(100.0, 0.0)
    rate.observe(100.0, 0.0)  # no group was left to train on
    assert rate.next_rates(1, 1.0) == [0.25]
    assert rate.metrics()["lr_decay/num_decays"] == 1


@pytest.mark.parametrize("flags", [{}, DECAYS])
@pytest.mark.parametrize("done", range(7))
def test_it_resumes_where_it_was(flags, done):
    flags = {"lr_warmup_steps": 2, "lr_decay_style": "cosine", **flags}
    whole = list(advance(make(7, **flags), 7))
    first, second = make(7, **flags), make(7, **flags)
    list(advance(first, done))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(advance(second, 7 - done)) == whole[done:]


def test_another_learning_rate_at_resume_takes_over():
    first, second = make(5, lr_warmup_steps=4), make(5, lr_warmup_steps=4, lr=3.0)
    first.next_rates(1, 1.0)
    second.load_state_dict(first.state_dict())
    assert second.next_rates(1, 1.0) == [1.5]


@pytest.mark.parametrize(("wrote", "reads"), [({}, DECAYS), (DECAYS, {})])
def test_the_state_of_another_schedule_is_refused(wrote, reads):
    with pytest.raises(
        ConfigError, match=r"schedule does not fit these settings.*--lr-schedule as"
    ):
        make(5, **reads).load_state_dict(make(5, **wrote).state_dict())


@pytest.mark.parametrize(
    ("flags", "period"),
    [
        ({}, 160),
        ({"length_decay_default_period": 50}, 50),
        ({"length_decay_default_period": 0}, None),
    ],
)
def test_without_a_surge_the_default_period_is_the_flags(flags, period):
    rate = make(5, lr_schedule="length-decay", **flags)
    for _ in range(200):
        rate.observe(100.0, 0.0)
    assert rate.decay.period == period


def scheduled(config, rollouts):
    """The rates of torch's schedule, wrapped by length decay's, times the governor's scale."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=config.trainer.lr)
    total = config.rollout.num_rollout * config.steps_per_rollout
    base = LambdaLR(optimizer, lambda step: base_factor(step, config.trainer, total))
    schedule, decay = base, LengthDecay(config.trainer.length_decay)
    if config.trainer.lr_schedule == "length-decay":
        schedule = LengthDecaySchedule(base, optimizer, decay)
    for num_steps, length, governor in rollouts:
        if schedule is not base:
            schedule.observe(length, 0.0)
            governor = decay.bounded(governor)
        for _ in range(num_steps):
            yield optimizer.param_groups[0]["lr"] * governor
            optimizer.step()
            schedule.step()


ROLLOUTS = st.lists(
    st.tuples(st.integers(0, 3), st.floats(1, 1e4), st.floats(1e-3, 1) | st.just(1.0)),
    min_size=1,
    max_size=40,
)


@given(
    rollouts=ROLLOUTS,
    lr=st.floats(1e-9, 1),
    style=st.sampled_from(["constant", "linear", "cosine"]),
    warm_up=st.integers(0, 12),
    schedule=st.sampled_from(["", "length-decay"]),
    period=st.none() | st.integers(1, 9),
)
def test_rates_are_those_of_schedules_in_an_optimizer_to_the_last_bit(
    rollouts, lr, style, warm_up, schedule, period
):
    config = make_config(
        len(rollouts),
        lr=lr,
        lr_decay_style=style,
        lr_warmup_steps=warm_up,
        lr_schedule=schedule,
        length_decay_period=period,
        length_decay_default_period=3,
    )
    rate, rates = LearningRate(config), []
    for num_steps, length, governor in rollouts:
        rate.observe(length, 0.0)
        rates += rate.next_rates(num_steps, governor)
    assert rates == list(scheduled(config, rollouts))


def test_a_state_of_another_shape_is_refused_by_name():
    state = make(5).state_dict()
    with pytest.raises(ConfigError, match=r"^--load: .*steps_taken='3': should be a valid integer"):
        make(5).load_state_dict({**state, "steps_taken": "3"})
