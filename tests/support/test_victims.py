"""Forty kills of a soak reach every kind of process."""

from collections import Counter

import psutil

from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.scoring_workers import Workers
from tests.support.samples import to_score
from tests.support.victims import VICTIMS, of_kind, victim_of


def test_every_kind_is_drawn_as_often_as_any_other():
    drawn = [victim_of(0, number) for number in range(5 * len(VICTIMS))]
    assert Counter(drawn) == dict.fromkeys(VICTIMS, 5)


def test_the_workers_that_score_are_found_and_no_other_process():
    here = psutil.Process()
    workers = Workers(RewardConfig(), ["exact"], count=1)
    try:
        workers.ask("exact", [[to_score("42")]])()
        source, worker = of_kind("reward", here, here.children(recursive=True))
        assert worker.parent() == source and source.parent() == here
        for found in (worker, source):
            found.kill()
            assert workers.ask("exact", [[to_score("42")]])() == [{"score": 1.0, "answer": "42"}]
    finally:
        workers.close()
