"""Forty kills of a soak reach every kind of process."""

from collections import Counter

from tests.support.victims import VICTIMS, victim_of


def test_every_kind_is_drawn_as_often_as_any_other_and_in_an_order_that_changes():
    for seed in (0, 1):
        drawn = [victim_of(seed, number) for number in range(5 * len(VICTIMS))]
        assert Counter(drawn) == dict.fromkeys(VICTIMS, 5)
        laps = {tuple(drawn[i : i + len(VICTIMS)]) for i in range(0, len(drawn), len(VICTIMS))}
        assert len(laps) > 1
        assert drawn == [victim_of(seed, number) for number in range(5 * len(VICTIMS))]
