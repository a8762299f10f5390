"""Digests of rows of log-probabilities: exact, and of every entry.

Reports elsewhere: row kernels that read a padded vocabulary by the wrong stride
(PrimeIntellect-ai/prime-rl#2710), masked columns of -inf that became NaN (NovaSky-AI/SkyRL#2259).
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops import row_digests as module
from onpolicy.ops.row_digests import NO_DIGEST, row_digests

MASK = (1 << 64) - 1
INF = torch.tensor(math.inf)


def rows_of(count=3, size=137, seed=0):
    made = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return made.log_softmax(-1)


def mixed(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def test_a_digest_is_the_sum_that_the_module_says():
    rows = rows_of()
    for row, digest in zip(rows, row_digests(rows).tolist(), strict=True):
        bits = row.view(torch.int32).tolist()
        total = mixed(len(bits)) + sum(x * (mixed(i) | 1) for i, x in enumerate(bits))
        assert digest % (1 << 64) == total & MASK


@given(st.integers(0, 136), st.booleans())
def test_the_last_bit_of_any_entry_changes_the_digest_of_its_row_alone(column, rises):
    rows = rows_of()
    other = rows.clone()
    other[1, column] = torch.nextafter(rows[1, column], INF if rises else -INF)
    differ = row_digests(rows) != row_digests(other)
    assert differ.tolist() == [False, True, False]


@given(st.integers(0, 136), st.integers(0, 136))
def test_two_entries_that_change_places_change_the_digest(a, b):
    rows = rows_of(1)
    other = rows.clone()
    other[0, [a, b]] = rows[0, [b, a]]
    assert (row_digests(rows) == row_digests(other)).item() == (a == b)


def test_the_two_zeros_differ():
    zeros = torch.zeros(1, 5)
    assert row_digests(zeros) != row_digests(-zeros)


@pytest.mark.parametrize("column", [0, 70, 136])
def test_a_nan_leaves_its_row_without_a_digest_and_no_other(column):
    rows = rows_of()
    rows[2, column] = math.nan
    assert row_digests(rows)[2] == NO_DIGEST
    assert torch.equal(row_digests(rows)[:2], row_digests(rows_of())[:2])


def test_masked_columns_have_a_digest_which_says_where_they_are():
    first, second = rows_of(1), rows_of(1)
    first[0, 5], second[0, 6] = -math.inf, -math.inf
    digests = {int(row_digests(x)) for x in (rows_of(1), first, second)}
    assert len(digests) == 3 and NO_DIGEST not in digests


@pytest.mark.parametrize("padding", [0.0, -math.inf, -1.0])
def test_a_row_is_not_one_that_a_padded_vocabulary_makes_longer(padding):
    padded = torch.nn.functional.pad(rows_of(), (0, 7), value=padding)
    assert not (row_digests(rows_of()) == row_digests(padded)).any()
    assert torch.equal(row_digests(padded[:, :137]), row_digests(rows_of()))  # a view with strides


def test_no_row_depends_on_those_beside_it_or_on_chunks(monkeypatch):
    whole = row_digests(rows_of(9))
    assert torch.equal(torch.cat([row_digests(row[None]) for row in rows_of(9)]), whole)
    for numbers in (1, 50, 1000):
        monkeypatch.setattr(module, "NUMBERS", numbers)
        assert torch.equal(row_digests(rows_of(9)), whole)
    assert len(row_digests(rows_of(0))) == 0


def test_rows_of_another_dtype_are_refused_and_widening_them_does_not_hide_it():
    """As logits that were rounded to bfloat16 on their way and widened again."""
    rounded = rows_of().bfloat16()
    with pytest.raises(TypeError, match=r"log_probs=torch\.bfloat16: .* float32"):
        row_digests(rounded)
    assert not (row_digests(rounded.float()) == row_digests(rows_of())).any()
