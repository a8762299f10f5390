import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from benchmarks.surge_detector import surge
from fallback_correction.length_decay import (
    LengthDecay,
    LengthDecayConfig,
    LengthDecaySchedule,
    SurgeDetectorConfig,
)
from tests.support.forked_ranks import run_on_ranks


def level(n=300):
    return [1000.0] * n


def scales(lengths, **config):
    """The scale of every step, from step 1."""
    decay = LengthDecay(LengthDecayConfig(**config))
    return [decay.step(length) for length in lengths]


# The decision


@given(
    period=st.integers(1, 60),
    factor=st.floats(1.1, 10),
    floor=st.floats(0.01, 1),
    n=st.integers(1, 300),
)
def test_given_period_is_algorithm_1_line_by_line(period, factor, floor, n):
    expected, rate = [], 1.0
    for t in range(1, n + 1):
        if t % period == 0:
            rate = max(rate / factor, floor)
        expected.append(rate)
    for lengths in (level(n), surge(20, rise=1, n=n)):  # which it does not ask
        assert scales(lengths, period=period, factor=factor, floor=floor) == expected


@pytest.mark.parametrize(("onset", "period"), [(110, 198), (90, 162), (11, 20)])
def test_period_is_1_8_times_the_onset(onset, period):
    """The paper used 204 after a surge near 110, and 160 after one near 90."""
    lengths = surge(onset, rise=1, n=1000)
    assert scales(lengths) == scales(lengths, period=period)


def test_without_a_surge_the_default_period_sets_in():
    """160 rollouts, as the paper's 8B model had and its 4B model would have borne."""
    assert scales(level(1000)) == scales(level(1000), period=160)
    assert scales(level(1000), default_period=70) == scales(level(1000), period=70)
    assert set(scales(level(1000), default_period=0)) == {1.0}


def test_a_surge_before_the_default_period_has_the_say_and_one_after_it_none():
    before, after = surge(120, rise=1, n=1000), surge(170, rise=1, n=1000)
    assert scales(before) == scales(before, period=216)
    assert scales(after) == scales(after, period=160)
    decay = LengthDecay()
    for length in after:
        decay.step(length)
    assert (decay.period, decay.detector.onset) == (160, 170)


def test_late_confirmation_decays_at_once_and_keeps_the_deadlines():
    """Onset 11, period 20, confirmed at 15 or, with more steps to confirm, at 22: 2 steps late."""
    lengths = surge(11, rise=1, n=100)
    slow = SurgeDetectorConfig(confirmation_steps=12)
    in_time, late = scales(lengths), scales(lengths, detector=slow)
    assert in_time[18:21] == [1.0, 0.5, 0.5]
    assert late[18:23] == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert late[21:] == in_time[21:]


def test_decays_are_not_counted_below_the_floor():
    decay = LengthDecay(LengthDecayConfig(period=1))
    for _ in range(50):
        decay.step(1000.0)
    assert (decay.scale, decay.num_decays, decay.num_rollout_steps) == (0.1, 4, 50)


@pytest.mark.parametrize(
    ("decays", "factor", "share"),
    [(0, 0.5, 0.5), (1, 0.5, 0.25), (2, 0.5, 0.125), (3, 0.5, 0.1), (4, 0.5, 0.1), (0, 0.05, 0.1),
     (4, 1.0, 0.1), (1, 1.0, 0.5)],
)  # fmt: skip
def test_another_factor_of_the_rate_does_not_undercut_the_floor(decays, factor, share):
    """The governor's 0.5 on top of the floor's 0.1 made 0.05."""
    decay = LengthDecay(LengthDecayConfig(period=1))
    for _ in range(decays):
        decay.step(1000.0)
    assert decay.scale * decay.bounded(factor) == pytest.approx(share, rel=1e-15)


def test_metrics_before_and_after_the_surge():
    decay = LengthDecay()
    lengths = surge(100, rise=1)
    for length in lengths[:103]:
        decay.step(length)
    assert decay.metrics() == {
        "lr_decay/scale": 1.0, "lr_decay/onset": 0.0, "lr_decay/period": 0.0,
        "lr_decay/num_decays": 0.0, "lr_decay/length_ratio": 3.5,
    }  # fmt: skip
    for length in lengths[103:180]:
        decay.step(length)
    assert decay.metrics() == {
        "lr_decay/scale": 0.5, "lr_decay/onset": 100.0, "lr_decay/period": 180.0,
        "lr_decay/num_decays": 1.0, "lr_decay/length_ratio": 3.5,
    }  # fmt: skip


@given(
    cut=st.integers(0, 120),
    onset=st.integers(2, 60),
    period=st.none() | st.integers(1, 50),
    default=st.integers(0, 90),
)
def test_resumed_decision_continues_identically(cut, onset, period, default):
    config = LengthDecayConfig(period=period, default_period=default)
    lengths = surge(onset, rise=3, n=120)
    whole, first, second = LengthDecay(config), LengthDecay(config), LengthDecay(config)
    for length in lengths[:cut]:
        assert first.step(length) == whole.step(length)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for length in lengths[cut:]:
        assert second.step(length) == whole.step(length)
        assert second.metrics() == whole.metrics()
    assert second.state_dict() == whole.state_dict()


def test_period_and_floor_changed_at_a_resume_take_over():
    saved = LengthDecay(LengthDecayConfig(period=10))
    for _ in range(45):
        saved.step(1000.0)
    assert saved.scale == 0.1
    resumed = LengthDecay(LengthDecayConfig(period=1000, floor=0.2))
    resumed.load_state_dict(saved.state_dict())
    assert resumed.step(1000.0) == 0.2


def test_a_state_from_before_default_periods_is_taken_up():
    config, lengths = LengthDecayConfig(), surge(20, rise=1, n=100)
    whole, resumed = LengthDecay(config), LengthDecay(config)
    for length in lengths[:50]:
        whole.step(length)
    state = whole.state_dict()
    del state["found_period"]
    resumed.load_state_dict(state)
    assert [resumed.step(x) for x in lengths[50:]] == [whole.step(x) for x in lengths[50:]]


@pytest.mark.parametrize(
    "setting",
    [{"period": 0}, {"factor": 1.0}, {"floor": 0.0}, {"floor": 1.5}, {"onset_multiplier": 0.0},
     {"default_period": -1}],
)  # fmt: skip
def test_impossible_setting_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        LengthDecayConfig(**setting)


# The schedule


class MegatronLike:
    """`OptimizerParamScheduler` where it matters here, after NVIDIA/Megatron-LM's interface.

    It recomputes the rate from the number of samples at every step, knows nothing of what is in the
    optimizer, drops unknown keys of a state, and steps while it loads one.
    """

    def __init__(self, optimizer, max_lr=1e-6, warmup=32, decay_steps=6400):
        self.optimizer, self.num_steps = optimizer, 0
        self.max_lr, self.warmup, self.decay_steps = max_lr, warmup, decay_steps
        self.step(0)

    def get_lr(self, group):
        max_lr = group.get("max_lr", self.max_lr)
        if self.num_steps <= self.warmup:
            return max_lr * self.num_steps / self.warmup
        progress = min((self.num_steps - self.warmup) / (self.decay_steps - self.warmup), 1.0)
        return max_lr * 0.5 * (math.cos(math.pi * progress) + 1.0)

    def step(self, increment):
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group)

    def state_dict(self):
        return {"max_lr": self.max_lr, "num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.max_lr = state["max_lr"]
        self.step(increment=state["num_steps"])


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10), cosine(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[10])


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=60, eta_min=1e-9)


BASES = {
    "LambdaLR constant": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "LambdaLR warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 7)),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 20),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, 70),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.97),
    "CosineAnnealingLR": cosine,
    "SequentialLR": sequential,
    "Megatron-like": MegatronLike,
}
LENGTHS = surge(12, rise=2, n=100)  # period 22


def make_optimizer(tensor_rates=False):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rates = [torch.tensor(rate) if tensor_rates else rate for rate in (1e-6, 3e-5)]
    groups = [
        {"params": [p], "lr": rate, "max_lr": float(rate)}
        for p, rate in zip(parameters, rates, strict=True)
    ]
    return torch.optim.AdamW(groups)


def advance(schedule):
    """One step of a base schedule or of a wrapped one."""
    base = getattr(schedule, "base", schedule)
    schedule.step(increment=16) if isinstance(base, MegatronLike) else schedule.step()


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def make_schedule(base, tensor_rates=False, **config):
    optimizer = make_optimizer(tensor_rates)
    decay = LengthDecay(LengthDecayConfig(**config))
    return optimizer, LengthDecaySchedule(BASES[base](optimizer), optimizer, decay)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("tensor_rates", [False, True])
def test_rate_is_the_base_rate_times_the_scale_to_the_last_bit(base, updates, tensor_rates):
    alone = make_optimizer(tensor_rates)
    reference = BASES[base](alone)
    optimizer, schedule = make_schedule(base, tensor_rates)
    expected_scales, dtype = scales(LENGTHS), rate_dtype(optimizer)
    for length, scale in zip(LENGTHS, expected_scales, strict=True):
        schedule.observe(length)
        for _ in range(updates):
            expected = [float(torch.tensor(r * scale, dtype=dtype)) for r in rates_of(alone)]
            assert rates_of(optimizer) == expected == schedule.get_last_lr()
            advance(reference)
            advance(schedule)
    assert expected_scales[-1] == 0.1


def rate_dtype(optimizer):
    rate = optimizer.param_groups[0]["lr"]
    return rate.dtype if isinstance(rate, torch.Tensor) else torch.float64


def test_rate_in_a_tensor_stays_in_that_tensor():
    optimizer, schedule = make_schedule("LambdaLR constant", tensor_rates=True, period=1)
    tensors = [group["lr"] for group in optimizer.param_groups]
    schedule.observe(1000.0)
    schedule.step()
    assert all(g["lr"] is t for g, t in zip(optimizer.param_groups, tensors, strict=True))
    assert tensors[0] == torch.tensor(1e-6) / 2


@given(base=st.sampled_from(sorted(BASES)), cut=st.integers(0, 60), tensors=st.booleans())
def test_resumed_schedule_continues_identically(base, cut, tensors):
    optimizer, schedule = make_schedule(base, tensors)
    for length in LENGTHS[:cut]:
        schedule.observe(length)
        advance(schedule)
    saved = copy.deepcopy((schedule.state_dict(), optimizer.state_dict()))
    resumed_optimizer, resumed = make_schedule(base, tensors)
    resumed_optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    assert rates_of(resumed_optimizer) == rates_of(optimizer)
    for length in LENGTHS[cut : cut + 30]:
        for one in (schedule, resumed):
            one.observe(length)
            advance(one)
        assert rates_of(resumed_optimizer) == rates_of(optimizer)
        assert resumed.decay.metrics() == schedule.decay.metrics()


def test_resumed_megatron_schedule_keeps_a_rate_it_was_told_to_override():
    _, schedule = make_schedule("Megatron-like", period=1)
    schedule.observe(1000.0)
    advance(schedule)
    state = schedule.state_dict()
    state["base"]["max_lr"] = 8e-6
    resumed_optimizer, resumed = make_schedule("Megatron-like", period=1)
    for group in resumed_optimizer.param_groups:
        del group["max_lr"]
    resumed.load_state_dict(state)
    assert rates_of(resumed_optimizer) == [8e-6 * 16 / 32 / 2] * 2


def test_state_of_a_base_schedule_alone_is_refused():
    _, schedule = make_schedule("ConstantLR")
    with pytest.raises(ValueError, match="length_decay"):
        schedule.load_state_dict(schedule.base.state_dict())


def test_state_for_another_number_of_groups_is_refused():
    _, schedule = make_schedule("ConstantLR")
    state = schedule.state_dict()
    state["length_decay"]["base_rates"] = [1.0]
    with pytest.raises(ValueError, match="base_rates"):
        schedule.load_state_dict(state)


# Several ranks


def run_rank(rank, directory):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    optimizer, schedule = make_schedule("CosineAnnealingLR")
    seen = []
    for step, length in enumerate(LENGTHS):
        own = [length, 0.0] if rank == 0 else [2000.0 + step, 0.5]
        schedule.observe(*own)
        schedule.step()
        seen.append([rates_of(optimizer), schedule.decay.metrics(), schedule.decay.state_dict()])
    (directory / f"{rank}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


def test_rank_0_decides_for_all_ranks(tmp_path):
    run_on_ranks(run_rank, (tmp_path,), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert [metrics["lr_decay/scale"] for _, metrics, _ in first] == scales(LENGTHS)
    assert first[-1][1]["lr_decay/onset"] == 12.0


def test_broadcast_given_by_hand_decides():
    optimizer = make_optimizer()
    sent = iter([value for length in LENGTHS for value in (length, 0.0)])
    schedule = LengthDecaySchedule(
        BASES["ConstantLR"](optimizer), optimizer, LengthDecay(), broadcast=lambda _: next(sent)
    )
    for _ in LENGTHS:
        schedule.observe(math.nan, math.nan)
    assert schedule.decay.scale == 0.1
