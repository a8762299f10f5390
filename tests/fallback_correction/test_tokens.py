import math

import pytest
import torch
from hypothesis import given

from fallback_correction.tokens import (
    TokenBatch,
    exact_sum,
    global_sequence_mean,
    global_token_mean,
)
from tests.support.token_batches import by_log_ratios, on_ranks, select, spread_batches

BATCH = by_log_ratios([[1, 2, 4], [], [8], [16, 32]], [[1, 0, 1], [], [0], [1, 1]])


def test_sums_means_maxima_and_counts_exactly():
    values = BATCH.train_log_probs
    assert BATCH.counts.tolist() == [2, 0, 0, 2]
    assert BATCH.sums(values).tolist() == [5, 0, 0, 48]
    assert BATCH.means(values).tolist() == [2.5, 0, 0, 24]
    assert BATCH.maxima(values).tolist() == [4, -math.inf, -math.inf, 32]
    assert BATCH.spread(BATCH.counts).tolist() == [2, 2, 2, 0, 2, 2]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_stands_at_masked_tokens_does_not_matter(junk):
    values = BATCH.train_log_probs
    spoiled = torch.where(BATCH.mask, values, junk)
    for reduce in (BATCH.sums, BATCH.means, BATCH.maxima):
        assert torch.equal(reduce(spoiled), reduce(values))
    assert global_token_mean(BATCH, spoiled) == 53 / 4


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_batches_without_tokens_have_sums_of_zero_and_default_means(lengths):
    empty = TokenBatch.packed(torch.empty(0), torch.empty(0), lengths)
    assert empty.sums(torch.empty(0)).tolist() == empty.counts.tolist() == [0] * len(lengths)
    assert global_token_mean(empty, torch.empty(0), default=3.0) == 3
    assert global_sequence_mean(empty, torch.zeros(len(lengths)), default=3.0) == 3


def test_sequences_without_a_counting_token_are_no_part_of_a_mean_over_sequences():
    values = torch.tensor([1.0, math.nan, math.inf, 2.0])
    assert global_sequence_mean(BATCH, values) == 1.5


def test_padded_and_packed_batches_are_the_same_tokens():
    train, rollout = torch.rand(2, 3), torch.rand(2, 3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = TokenBatch.padded(train, rollout, mask)
    packed = TokenBatch.packed(train.flatten(), rollout.flatten(), [3, 3], mask.flatten())
    assert padded.lengths.tolist() == packed.lengths.tolist() == [3, 3]
    assert torch.equal(padded.train_log_probs, packed.train_log_probs)
    assert torch.equal(padded.sums(padded.rollout_log_probs), packed.sums(rollout.flatten()))
    assert padded.counts.tolist() == [2, 3]


def test_padding_does_not_change_the_bits_of_a_sum():
    values = torch.randn(7)
    short = TokenBatch.packed(values, values, [7])
    padded = torch.cat([values, torch.zeros(5)])
    long = TokenBatch.packed(padded, padded, [12], torch.arange(12) < 7)
    assert torch.equal(short.sums(values), long.sums(padded))


@pytest.mark.parametrize(
    ("tokens", "rollout", "mask", "lengths"),
    [(3, 2, 3, [3]), (3, 3, 2, [3]), (3, 3, 3, [2]), (3, 3, 3, [])],
)
def test_tensors_of_different_lengths_are_refused(tokens, rollout, mask, lengths):
    with pytest.raises(ValueError, match=r"all must be the same number of tokens"):
        TokenBatch.packed(torch.zeros(tokens), torch.zeros(rollout), lengths, torch.ones(mask))


def test_two_dimensional_tensors_are_refused():
    with pytest.raises(ValueError, match=r"Use TokenBatch.padded"):
        TokenBatch.packed(torch.zeros(2, 3), torch.zeros(2, 3), [3, 3])


def test_a_batch_carries_no_gradient_and_is_float32():
    log_probs = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    batch = TokenBatch.packed(log_probs, log_probs, [2])
    assert not batch.train_log_probs.requires_grad and not batch.rollout_log_probs.requires_grad
    assert batch.train_log_probs.dtype == batch.rollout_log_probs.dtype == torch.float32


def test_the_exact_sum_is_rounded_once():
    assert exact_sum(torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64)) == 1


@given(spread_batches())
def test_sums_and_means_have_the_same_bits_in_any_order_and_split(case):
    batch, parts = case
    sums = batch.spread(batch.sums(batch.train_log_probs))
    for part, index in parts:
        assert torch.equal(part.spread(part.sums(part.train_log_probs)), sums[index])

    def means(part, gather):
        token_mean = global_token_mean(part, part.train_log_probs, gather)
        return token_mean, global_sequence_mean(part, part.means(part.train_log_probs), gather)

    whole = means(batch, lambda values: values)
    assert on_ranks([part for part, _ in parts], means) == [whole] * len(parts)


def test_select_takes_sequences_whole():
    part, index = select(BATCH, [3, 0])
    assert part.train_log_probs.tolist() == [16, 32, 1, 2, 4]
    assert part.lengths.tolist() == [2, 3] and index.tolist() == [4, 5, 0, 1, 2]
