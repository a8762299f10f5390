"""Rows that are read several times: what is read, and the sum that is their gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.shared_rows import SharedRows

COUNT = 7


@given(st.lists(st.integers(0, COUNT - 1), max_size=40), st.integers(0, 99))
def test_rows_are_taken_in_their_order_and_gradients_added_in_it(rows, seed):
    torch.manual_seed(seed)
    x = torch.randn(COUNT, 3, requires_grad=True)
    taken, grad = (
        SharedRows.of(rows).take(x),
        torch.randn(len(rows), 3),
    )
    assert torch.equal(taken, x[rows] if rows else x[:0])
    taken.backward(grad)
    total = torch.zeros(COUNT, 3)
    for row, part in zip(rows, grad, strict=True):
        total[row] += part
    assert torch.equal(x.grad, total)


def test_sums_of_bfloat16_are_float32_and_rounded_once():
    torch.manual_seed(0)
    grad = torch.randn(300, 5).bfloat16()
    found = SharedRows.of([0] * 300).add_up(grad, 1)[0]
    exact, rounded = torch.zeros(5), torch.zeros(5).bfloat16()
    for part in grad:
        exact += part.float()
        rounded += part
    assert torch.equal(found, exact.bfloat16()) and not torch.equal(found, rounded)


@pytest.mark.parametrize("answers", [1, 2, 8])
def test_short_runs_are_added_a_reading_at_a_time_to_the_same_bits(answers):
    """Prompts of five rows, each of which all answers to it read before a row of their own."""
    torch.manual_seed(0)
    rows, count = [], 0
    for _ in range(40):
        prompt, count = [*range(count, count + 5)], count + 5
        for _ in range(answers):
            rows += [*prompt, count]
            count += 1
    shared = SharedRows.of(rows)
    grad = torch.randn(len(rows), 3, 2)
    found, total = shared.add_up(grad, count), torch.zeros(count, 3, 2)
    for row, part in zip(rows, grad, strict=True):
        total[row] += part
    assert torch.equal(found, total)
    assert shared._has_short_runs == (answers > 1)
    backwards = torch.zeros(count, 3, 2)
    for row, part in zip(rows[::-1], grad.flip(0), strict=True):
        backwards[row] += part
    assert torch.equal(backwards, total) == (answers < 3)  # two numbers have one sum
