"""Forty kills of a soak reach every kind of process."""

from collections import Counter

import psutil

from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.workers import Workers
from tests.support.samples import to_score
from tests.support.victims import VICTIMS, of_kind, victim_of


def test_every_kind_is_drawn_as_often_as_any_other_and_in_an_order_that_changes():
    for seed in (0, 1):
        drawn = [victim_of(seed, number) for number in range(5 * len(VICTIMS))]
        assert Counter(drawn) == dict.fromkeys(VICTIMS, 5)
        laps = {tuple(drawn[i : i + len(VICTIMS)]) for i in range(0, len(drawn), len(VICTIMS))}
        assert len(laps) > 1
        assert drawn == [victim_of(seed, number) for number in range(5 * len(VICTIMS))]


def test_the_workers_that_score_are_found_and_no_other_process():
    here = psutil.Process()
    assert of_kind("reward", here, here.children()) == []
    workers = Workers(RewardConfig(), ["exact"], count=1)
    try:
        workers.ask("exact", [[to_score("42")]])()
        (found,) = of_kind("reward", here, here.children())
        found.kill()
        assert workers.ask("exact", [[to_score("42")]])() == [{"score": 1.0, "answer": "42"}]
    finally:
        workers.close()
