"""Measurements in turns, and what is compared."""

from onpolicy.run.bench.alternate import alternate


def test_neighbours_are_compared_and_the_first_round_is_thrown_away():
    order = []

    def measure(name, values):
        left = iter(values)

        def run():
            order.append(name)
            return next(left)

        return run

    result = alternate(
        {"ours": measure("ours", [99.0, 2.0, 8.0, 3.0]), "theirs": measure("theirs", [1, 1, 2, 1])},
        3,
    )
    assert order == ["ours", "theirs"] * 4
    assert result["ours"] == {"tokens_per_second": 3.0, "runs": [2.0, 8.0, 3.0]}
    assert result["ratio"] == 3.0  # the median of 2, 4 and 3
