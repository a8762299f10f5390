"""Megatron's optimizer under a run's settings, and Megatron's own schedule under length decay."""

import pytest
import torch

from fallback_correction.length_decay import LengthDecay, LengthDecayConfig, LengthDecaySchedule
from onpolicy.config import TrainConfig, groups

megatron = pytest.importorskip("onpolicy.train.megatron.optimizer")


def adamw():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.3)


def test_settings_are_the_flags_whatever_a_checkpoint_brought_along():
    flags = {"weight_decay": 0.25, "adam_beta1": 0.5, "adam_beta2": 0.75, "adam_eps": 1e-3}
    optimizer = adamw()
    megatron.use_settings(optimizer, TrainConfig(trainer=groups.TrainerConfig(**flags)))
    (group,) = optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 1e-3)


@pytest.mark.parametrize(("operators", "fused"), [("portable", True), ("cpu", None)])
def test_portable_operators_come_with_the_fused_step(operators, fused):
    optimizer = adamw()
    config = TrainConfig(operators=groups.OperatorsConfig(operators=operators))
    megatron.use_settings(optimizer, config)
    assert optimizer.param_groups[0]["fused"] is fused


def test_megatrons_own_schedule_can_be_wrapped_by_length_decay():
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def make(optimizer):
        return OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=0.3, min_lr=0.0, lr_warmup_steps=32, lr_decay_steps=640,
            lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=0,
            wd_incr_style="constant", use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )  # fmt: skip

    alone, optimizer = adamw(), adamw()
    base, decay = make(alone), LengthDecay(LengthDecayConfig(period=2))
    schedule = LengthDecaySchedule(make(optimizer), optimizer, decay)
    for _ in range(12):
        schedule.observe(100.0)
        assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"] * decay.scale
        for one in (base, schedule):
            one.step(increment=16)
    assert decay.num_decays == 4
