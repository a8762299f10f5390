"""Measurements in turns, and what is compared."""

import logging
import re

from onpolicy.bench.turns import compare_in_turns, take_turns


def test_neighbours_are_compared_and_the_first_round_is_thrown_away():
    order = []

    def measure(name, values):
        left = iter(values)

        def run():
            order.append(name)
            return next(left)

        return run

    result = compare_in_turns(
        {"ours": measure("ours", [99.0, 2.0, 8.0, 3.0]), "theirs": measure("theirs", [1, 1, 2, 1])},
        3,
    )
    assert order == ["ours", "theirs"] * 4
    assert result["ours"] == {"tokens_per_second": 3.0, "runs": [2.0, 8.0, 3.0]}
    assert result["ratio"] == 3.0  # the median of 2, 4 and 3


def test_after_the_turns_that_warm_up_the_time_of_the_others_is_said(caplog):
    caplog.set_level(logging.INFO)
    said = []
    values = iter(range(10))

    def measure():
        said.append(len(caplog.records))
        return next(values)

    turns = take_turns({"ours": measure, "theirs": measure}, 2, 3)
    assert turns == {"ours": [4, 6, 8], "theirs": [5, 7, 9]}
    assert said == [0] * 4 + [1] * 6
    assert re.fullmatch(r"warmed up in \S+; about \S+ more", caplog.messages[0])
