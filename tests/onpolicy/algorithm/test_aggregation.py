import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.algorithm.aggregation import token_shares
from tests.support.token_batches import batches, by_log_ratios, on_ranks, spread_batches

BATCH = by_log_ratios([[1, 2, 3], [4], [5]], [[1, 0, 1], [1], [0]])
AGGREGATIONS = {
    "token-mean": None,
    "seq-mean-token-mean": None,
    "seq-mean-token-sum": None,
    "seq-mean-token-sum-norm": 7.0,
}


def shares_of(batch, aggregation, *gather):
    return token_shares(batch, aggregation, *gather, scale_length=AGGREGATIONS[aggregation])


@pytest.mark.parametrize(
    ("aggregation", "shares", "loss"),
    [
        ("token-mean", [1 / 3, 0, 1 / 3, 1 / 3, 0], 8 / 3),
        ("seq-mean-token-mean", [1 / 4, 0, 1 / 4, 1 / 2, 0], 3.0),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 1 / 2, 0], 4.0),
        ("seq-mean-token-sum-norm", [1 / 14, 0, 1 / 14, 1 / 14, 0], 4 / 7),
    ],
)
def test_aggregations_exactly(aggregation, shares, loss):
    found = shares_of(BATCH, aggregation)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == pytest.approx(shares)
    assert (found * BATCH.train_log_probs).sum().item() == pytest.approx(loss)


@given(batches())
def test_shares_sum_to_what_they_must(batch):
    tokens, sequences = batch.counts.sum().item(), (batch.counts > 0).sum().item()
    per_sequence = tokens / max(sequences, 1)
    expected = {
        "token-mean": 1.0 if tokens else 0.0,
        "seq-mean-token-mean": 1.0 if tokens else 0.0,
        "seq-mean-token-sum": per_sequence,
        "seq-mean-token-sum-norm": per_sequence / 7,
    }
    for aggregation, total in expected.items():
        shares = shares_of(batch, aggregation)
        assert shares.double().sum().item() == pytest.approx(total)
        assert not shares[~batch.mask].any()


@given(spread_batches(), st.sampled_from(list(AGGREGATIONS)))
def test_shares_have_the_same_bits_in_any_order_and_split(case, aggregation):
    batch, parts = case
    whole = shares_of(batch, aggregation)
    found = on_ranks(
        [part for part, _ in parts], lambda part, gather: shares_of(part, aggregation, gather)
    )
    for shares, (_, index) in zip(found, parts, strict=True):
        assert torch.equal(shares, whole[index])


@pytest.mark.parametrize("length", [None, 0.0, -1.0, math.nan])
def test_the_constant_length_must_be_given(length):
    with pytest.raises(ValueError, match=r"seq-mean-token-sum-norm divides by it"):
        token_shares(BATCH, "seq-mean-token-sum-norm", scale_length=length)
