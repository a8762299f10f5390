"""What is said of a result, in words and as a page."""

import re

import pytest

from onpolicy.explain.findings import render, told
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


def test_a_layer_is_a_row_and_an_operator_a_column():
    page = render(RESULT, told(RESULT))
    layers, others = re.findall(r"<table class=heat>.*?</table>", page)
    rows = [re.findall(r"<t[dh][^>]*>[^<]*(?:<span>[^<]*)?", row) for row in layers.split("<tr>")]
    assert [len(row) for row in rows[1:]] == [3, 3, 3]
    assert re.findall(r'<td class="(.*?)"', layers) == ["same", "own s1", "given s4"]
    assert re.findall(r'<td class="(.*?)"', others) == ["same", "given s4"]
    assert "attention of layers.1.self_attn: of 100 rows 80 differ, 0 of them for equal" in layers


def test_tokens_are_coloured_by_their_difference_and_nan_is_one():
    page = render(RESULT, "")
    tokens = re.findall(r'<span class="([^"]*)" title="rollout [^"]*">(\d+)</span>', page)
    assert tokens == [("same", "5"), ("own s5", "9"), ("own s5", "7")]


def test_the_page_needs_no_network_and_makes_no_html_of_names():
    page = render(RESULT, "<script>alert(1)</script>")
    assert "<script" not in page and "http" not in page and "<q>" not in page
