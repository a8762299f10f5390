"""Megatron's schedule of the learning rate, beside the other engine's."""

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.config.flags import with_flags
from onpolicy.train import optimizer as fsdp

megatron = pytest.importorskip("onpolicy.train.megatron.optimizer")

STEPS = 7


def make(engine, flags):
    config = TrainConfig(
        rollout=groups.RolloutConfig(num_rollout=STEPS),
        trainer=with_flags(groups.TrainerConfig(lr=0.3), flags),
    )
    optimizer = fsdp.make_optimizer([torch.nn.Parameter(torch.zeros(1))], config.trainer)
    return optimizer, engine.make_schedule(optimizer, config)


def advance(optimizer, schedule, steps):
    for _ in range(steps):
        if hasattr(schedule, "observe"):
            schedule.observe(100.0)
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


FLAGS = [
    {},
    {"lr_warmup_steps": 3},
    {"lr_decay_style": "linear"},
    {"lr_warmup_steps": 2, "lr_decay_style": "cosine"},
    {"lr_warmup_steps": 2, "lr_schedule": "length-decay", "length_decay_period": 2},
]


@pytest.mark.parametrize("flags", FLAGS)
def test_rates_are_the_other_engines(flags):
    ours, theirs = (list(advance(*make(engine, flags), STEPS)) for engine in (megatron, fsdp))
    assert ours == theirs


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("done", [0, 1, 4])
def test_a_schedule_resumes_where_it_was(flags, done):
    whole = list(advance(*make(megatron, flags), STEPS))
    first, second = make(megatron, flags), make(megatron, flags)
    list(advance(*first, done))
    second[1].load_state_dict(first[1].state_dict())
    assert list(advance(*second, STEPS - done)) == whole[done:]


def test_weight_decay_is_the_flags():
    optimizer, _ = make(megatron, {"weight_decay": 0.25})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25]
