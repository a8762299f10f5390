"""Keys of prefixes, and digests of rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.explain.taps.rows import by_row, digest, prefix_keys
from tests.support.violations import next_up

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@given(TOKENS, st.integers(0, 40))
def test_a_prefix_can_be_gone_on_from(tokens, cut):
    whole = prefix_keys(tokens)
    first = prefix_keys(tokens[:cut])
    assert whole == first + prefix_keys(tokens[cut:], first[-1] if first else 0)


@given(TOKENS, st.data())
def test_another_token_gives_another_key_from_there_on(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    others = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    a, b = prefix_keys(tokens), prefix_keys(others)
    assert a[:at] == b[:at]
    assert not set(a[at:]) & set(b)


@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]))
def test_one_ulp_of_one_number_shows_in_its_row_alone(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 33, generator=generator).to(dtype)
    y, row, column = x.clone(), seed % 7, seed % 33
    y[row, column] = next_up(y[row, column])
    assert (digest(x) != digest(y)).nonzero().tolist() == [[row]]


def test_the_digest_is_of_numbers_and_not_of_memory():
    x = torch.randn(6, 4, 5).bfloat16()
    assert torch.equal(digest(x), digest(x.float()))
    assert torch.equal(digest(x), torch.cat([digest(x[i : i + 1]) for i in range(6)]))
    assert torch.equal(digest(x.flatten(1)), digest(x.transpose(0, 1).contiguous().transpose(0, 1)))
    assert digest(torch.tensor([[0.0, 1.0]])) == digest(torch.tensor([[-0.0, 1.0]]))
    assert len(digest(torch.zeros(3, 0))) == 3


def test_rows_are_found_on_whichever_axis_they_are():
    x = torch.randn(1, 6, 4, 5)  # [1, T, H, D]
    by_head = x.transpose(1, 2)
    assert torch.equal(by_row(x, 6).reshape(6, -1), by_row(by_head, 6).reshape(6, -1))
    square = torch.randn(1, 4, 4, 5)  # as many heads as tokens
    assert torch.equal(by_row(square, 4), by_row(square.transpose(1, 2), 4))
    by_head = torch.randn(4, 4, 5).transpose(0, 1)  # [T, H, D], heads first in memory
    assert torch.equal(by_row(by_head, 4), by_head)
    assert by_row(torch.randn(1, 1, 9), 1).shape == (1, 9)
