"""What is said of a result, in words."""

import pytest

from onpolicy.explain.text import told
from tests.support.explained import RESULT


@pytest.mark.parametrize(
    ("rollout", "trainer", "said"),
    [
        (([0], 1), ([0], 1), []),
        (([1], 2), ([0], 1), ["rank 1 alone of the rollout's 2"]),
        (([0], 1), ([1], 2), ["rank 1 alone of the trainer's 2"]),
        (([0, 1], 2), ([0, 1, 2], 4), ["all ranks of the rollout's 2",
                                       "rank 0, 1, 2 alone of the trainer's 4"]),
    ],
)  # fmt: skip
def test_the_ranks_of_either_side_are_named_where_there_are_several(rollout, trainer, said):
    source = {**RESULT["source"], "ranks": rollout[0], "train_ranks": trainer[0]}
    result = {**RESULT, "source": source, "rollout_ranks": rollout[1], "train_ranks": trainer[1]}
    lines = [line for line in told(result).splitlines() if "tensor-parallel" in line]
    assert lines == [f"So it is on {which} tensor-parallel ranks." for which in said]
