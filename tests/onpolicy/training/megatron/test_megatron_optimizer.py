"""Megatron's optimizer, its schedule under length decay, and the exchange of gradients, rank by rank."""

from functools import reduce
from itertools import permutations
from operator import add
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fallback_correction.length_decay import LengthDecay, LengthDecayConfig, LengthDecaySchedule
from onpolicy.config import TrainConfig, groups
from tests.support.ranks import on_ranks

megatron = pytest.importorskip("onpolicy.training.megatron.megatron_optimizer")


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


GRADIENTS = [torch.tensor([x, -0.0] * 5) for x in (1.0, 1e8, -1e8, 0.1, 0.3)]
"""Of five micro-batches: any other order has another sum."""


@pytest.fixture(params=[4, 1 << 24])
def block(request, monkeypatch):
    monkeypatch.setattr(megatron, "_BLOCK", request.param)
    monkeypatch.setattr(megatron, "finalize_model_grads", lambda *args: None)


def buffers_of_three_ranks():
    """What every rank leaves in its buffer to Megatron's own sum over ranks."""

    def run(rank):
        held = torch.zeros(len(GRADIENTS[0]))
        buffer = SimpleNamespace(grad_data=held, data_parallel_group=dist.group.WORLD)
        config = SimpleNamespace()
        model = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], config=config)
        ordered = megatron.OrderedGradients(model)
        for _ in range(2):  # optimizer steps
            held.zero_()
            ordered.start()
            held += GRADIENTS[rank]
            ordered.take()
            held += GRADIENTS[3 + rank] if 3 + rank < len(GRADIENTS) else 0.0
            config.finalize_model_grads_func([model])
        return held

    return on_ranks(3, run)


def test_any_sum_of_what_ranks_leave_is_that_of_one_rank(block):
    expected = reduce(add, GRADIENTS)
    for order in permutations(buffers_of_three_ranks()):
        assert torch.equal(reduce(add, order), expected)


def test_ranks_that_sum_their_own_first_have_another_sum():
    """So the test above would notice."""
    own = [reduce(add, GRADIENTS[rank::3]) for rank in range(3)]
    assert not torch.equal(reduce(add, own), reduce(add, GRADIENTS))
