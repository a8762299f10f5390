"""The simulation of schedules: closed forms where there are any."""

import dataclasses

import pytest

from benchmarks import lag_simulation
from benchmarks.lag_simulation import Costs, Setting, draw, simulate

COSTS = Costs(token=1.0, response=0.25, prefill=0.0, train=0.1, score=0.0, push=2.0)
SETTING = Setting(groups=4, samples=2, engines=2, slots=4, steps=10, prompt=0)


@pytest.fixture
def equal_lengths(monkeypatch):
    def endless(seed=0):
        while True:
            yield 10

    monkeypatch.setattr(lag_simulation, "lengths", endless)


def test_equal_responses_on_all_slots_end_together():
    """4 on each engine: (1 + 4 x 0.25) seconds a token."""
    assert draw([(0, 10)] * 8, SETTING, COSTS) == pytest.approx((20, 2 * 4 * 20))


def test_a_slot_that_is_free_takes_the_next_response():
    one = dataclasses.replace(SETTING, engines=1, slots=2)
    seconds, occupied = draw([(0, 10), (0, 4), (0, 6)], one, COSTS)
    assert (seconds, occupied) == pytest.approx((10 * 1.5, 2 * 10 * 1.5))


def test_a_prompt_holds_its_engine_up():
    one, costs = dataclasses.replace(SETTING, engines=1), dataclasses.replace(COSTS, prefill=0.5)
    assert draw([(8, 10)], one, costs)[0] == pytest.approx(8 * 0.5 + 10 * 1.25)


def test_a_lag_hides_the_shorter_of_the_two(equal_lengths):
    """A step draws for 20 seconds, trains for 8 and pushes for 2."""
    assert simulate(SETTING, COSTS).wall == pytest.approx(10 * (20 + 8 + 2))
    lagged = simulate(dataclasses.replace(SETTING, lag=1), COSTS)
    assert lagged.wall == pytest.approx(20 + 9 * (20 + 2) + (8 + 2))
    assert lagged.longest_lag == 1


def test_stale_samples_cost_a_pass_more(equal_lengths):
    """From the second step of a lag on, 4 seconds; a step without a lag has none."""
    costs = dataclasses.replace(COSTS, score=0.05)
    assert simulate(SETTING, costs).trainer_seconds == pytest.approx(10 * 8)
    lagged = simulate(dataclasses.replace(SETTING, lag=1), costs)
    assert lagged.trainer_seconds == pytest.approx(10 * 8 + 9 * 4)


def measured(costs, steps):
    """A result whose steps have these longest responses and tokens, and take what the costs say."""
    longest, tokens = zip(*steps, strict=True)
    lag_0 = {
        "tokens": tokens,
        "longest_responses": longest,
        "drawing_seconds": [costs.token * m + costs.response * t for m, t in steps],
        "train_seconds": [costs.train * (t + 8 * 5) for t in tokens],
        "push_seconds": [costs.push] * len(steps),
    }
    return {
        "schedules": {"lag 0": lag_0},
        "num_prompts": 4,
        "n_samples_per_prompt": 2,
        "prompt_len": 5,
    }


@pytest.mark.parametrize("changes", [{}, {"response": 0.0}, {"token": 0.0}])
def test_costs_are_read_from_the_steps_that_were_measured(changes):
    costs = dataclasses.replace(COSTS, **changes)
    result = measured(costs, [(100, 300), (90, 500), (200, 450)])
    found = lag_simulation.measured_costs(result)
    for name, value in dataclasses.asdict(costs).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-9)
    assert lag_simulation.measured_costs(result, 4).train == pytest.approx(costs.train / 4)
    setting = lag_simulation.measured_setting(result, 3)
    assert (setting.groups, setting.samples, setting.slots, setting.prompt) == (12, 2, 8, 5)
