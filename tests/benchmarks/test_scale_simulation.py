"""The simulation of scale: closed forms where there are any, and the product's own rules."""

from dataclasses import replace

import pytest

from benchmarks import scale_simulation
from benchmarks.scale_simulation import Attempt, Costs, Fleet, picture, simulate

COSTS = Costs(
    pass_=1.0, row=0.25, cached=0.0, prefill=0.0, train=1.0, exchange=(0.0, 0.0), push=2.0, slots=4
)
TOKENS = 10


def attempts(*tokens, prompt=0):
    return [Attempt(0, each, prompt) for each in tokens]


def ends(fleet, count):
    return [fleet.pop()[0] for _ in range(count)]


def test_equal_responses_on_all_slots_end_together():
    """4 on each engine: (1 + 4 x 0.25) seconds a token."""
    fleet = Fleet(2, COSTS)
    fleet.put(0.0, attempts(*[10] * 8))
    assert ends(fleet, 8) == pytest.approx([20.0] * 8)
    assert [engine.busy for engine in fleet.engines] == pytest.approx([20.0, 20.0])


def test_a_slot_that_is_free_takes_the_next_response():
    fleet = Fleet(1, replace(COSTS, slots=2))
    fleet.put(0.0, attempts(10, 4, 6))
    assert ends(fleet, 3) == pytest.approx([4 * 1.5, 15.0, 15.0])


def test_a_pass_takes_longer_the_more_tokens_are_cached():
    """A response of n tokens after p: n x (1.25 + p x 0.5) + 0.5 x n x n / 2 seconds."""
    fleet = Fleet(1, replace(COSTS, cached=0.5))
    fleet.put(0.0, attempts(10, prompt=4))
    fleet.engines[0].advance(7.0)
    assert ends(fleet, 1) == pytest.approx([10 * 3.25 + 25.0])


def test_a_response_waits_until_its_whole_length_fits_the_cache():
    fleet = Fleet(1, replace(COSTS, cache=15))
    fleet.put(0.0, attempts(10, 10))
    assert ends(fleet, 2) == pytest.approx([12.5, 25.0])
    assert fleet.longest_wait == pytest.approx(25.0)


def test_a_push_has_the_responses_wait_and_prefills_their_tokens_again():
    fleet = Fleet(1, replace(COSTS, prefill=0.5))
    fleet.put(0.0, attempts(10, prompt=4))
    fleet.interrupt(2.0 + 5 * 1.25, 1)
    assert ends(fleet, 1) == pytest.approx([2.0 + 12.5 + 2.0 + (4 + 5) * 0.5])
    assert fleet.longest_wait == pytest.approx(4.5 + 5 * 1.25), (
        "a request of its own since the push"
    )


@pytest.fixture
def equal_lengths(monkeypatch):
    monkeypatch.setattr(scale_simulation, "lengths", lambda count: [TOKENS] * count)
    monkeypatch.setattr(scale_simulation, "PROMPT", 0)
    monkeypatch.setattr(scale_simulation, "SAMPLES", 4)


def test_a_lag_and_the_free_schedule_hide_the_shorter_of_the_two(equal_lengths):
    """2 groups of 4 on 2 engines and 2 ranks: a step draws for 20 seconds, trains for 40, pushes for 2.
    The controller's work is in front of training."""
    costs, working = COSTS, replace(COSTS, ship=0.1)
    seconds = {name: simulate(name, 4, costs, 2)["seconds a step"] for name in ("lag 0", "lag 1")}
    assert seconds == pytest.approx({"lag 0": 20 + 40 + 2, "lag 1": 40 + 2})
    assert simulate("free", 4, costs, 2)["seconds a step"] == pytest.approx(40 + 2)
    late = simulate("lag 1", 4, working, 2)
    assert late["seconds a step"] == pytest.approx(8 + 40 + 2)
    assert late["limits"]["controller's thread"] == pytest.approx(8 / 50)


def test_the_free_schedule_does_not_wait_for_the_longest_response(monkeypatch):
    """Its groups that end first make a step; a schedule that waits for all has a tail."""
    rows = {name: simulate(name, 64, Costs(), 64) for name in scale_simulation.SCHEDULES}
    assert rows["free"]["seconds a step"] < 0.75 * rows["lag 1"]["seconds a step"]
    assert rows["lag 0"]["last tenth of the responses"] > 0.2
    assert rows["lag 0"]["engines sample"] < rows["free"]["engines sample"] <= 1


def test_a_picture_of_rows_is_drawn(tmp_path):
    rows = [simulate("lag 0", 8, Costs(read=1e-7, held=29.0), 8)]
    picture(rows, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
