import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fallback_correction.tokens import alone
from onpolicy.algorithm.objectives import token_shares
from tests.support.token_batches import batches, by_log_ratios, on_ranks, spread_batches

BATCH = by_log_ratios([[1, 2, 3], [4], [5]], [[1, 0, 1], [1], [0]])
AGGREGATIONS = {
    "token-mean": None, "seq-mean-token-mean": None, "seq-mean-token-sum": None,
    "seq-mean-token-sum-norm": 7.0,
}  # fmt: skip


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
        "token-mean": 1.0 if tokens else 0.0, "seq-mean-token-mean": 1.0 if tokens else 0.0,
        "seq-mean-token-sum": per_sequence, "seq-mean-token-sum-norm": per_sequence / 7,
    }  # fmt: skip
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


EPISODES = torch.tensor([5, 9, 5])
"""The first and the last sequence of `BATCH` are trajectories of one episode."""


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("token-mean", [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 6, 0, 1 / 6, 1 / 2, 1 / 6]),
        ("seq-mean-token-sum", [1 / 2, 0, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 14, 0, 1 / 14, 1 / 14, 1 / 14]),
    ],
)
def test_an_episode_is_one_sequence_with_the_tokens_of_its_trajectories(aggregation, shares):
    batch = by_log_ratios([[1, 2, 3], [4], [5]], [[1, 0, 1], [1], [1]])
    length = AGGREGATIONS[aggregation]
    found = token_shares(batch, aggregation, scale_length=length, episodes=EPISODES)
    assert found.tolist() == pytest.approx(shares)
    # The control: where each trajectory is a sequence, the episode weighs as much as two.
    if aggregation != "token-mean":
        assert shares_of(batch, aggregation).tolist() != pytest.approx(shares)


def test_an_episode_without_a_counting_token_is_none():
    found = token_shares(BATCH, "seq-mean-token-mean", episodes=torch.tensor([0, 0, 1]))
    assert found.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])


@given(spread_batches(), st.sampled_from(list(AGGREGATIONS)), st.data())
def test_shares_of_episodes_have_the_same_bits_wherever_their_trajectories_are(
    case, aggregation, data
):
    batch, parts = case
    number = st.integers(-1, len(batch.lengths))
    size = len(batch.lengths)
    episodes = torch.tensor(data.draw(st.lists(number, min_size=size, max_size=size)))
    length = AGGREGATIONS[aggregation]

    def shares(part, numbers, gather=alone):
        return token_shares(part, aggregation, gather, scale_length=length, episodes=numbers)

    whole = shares(batch, episodes.long())
    of_token = batch.spread(torch.arange(size))
    numbered = []
    for part, index in parts:
        places, at = [], 0
        for n in part.lengths.tolist():
            # An empty sequence has no token to be recognised by, and no share that depends on it.
            places.append(-1 if n == 0 else int(episodes[of_token[index[at]]]))
            at += n
        numbered.append((part, torch.tensor(places).long()))
    found = on_ranks(numbered, lambda pair, gather: shares(*pair, gather))
    for each, (_, index) in zip(found, parts, strict=True):
        assert torch.equal(each, whole[index])


@given(batches(), st.sampled_from(list(AGGREGATIONS)))
def test_episodes_of_one_trajectory_have_the_bits_of_sequences(batch, aggregation):
    numbers = torch.arange(len(batch.lengths))
    found = token_shares(
        batch, aggregation, scale_length=AGGREGATIONS[aggregation], episodes=numbers
    )
    assert torch.equal(found, shares_of(batch, aggregation))
