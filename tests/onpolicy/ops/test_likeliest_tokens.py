"""A model's log-probabilities of the tokens that an engine told: the sampled one's bits, float64's
gradients."""

import numpy as np
import pytest
import torch

from onpolicy.ops.kept_tokens import KeptTokens, packed, unpacked
from onpolicy.ops.likeliest_tokens import LikeliestTokens, likeliest_log_probs
from onpolicy.ops.log_probs import square_sums, token_log_probs
from tests.onpolicy.ops.test_reverse_kl import (
    OPERATORS,
    ROWS,
    VOCABULARY,
    distribution,
    make,
    require_close_gradients,
)
from tests.support.likeliest_bytes import packed as packed_likeliest

K = 7


def told_of(k=K, seed=3):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(ROWS, VOCABULARY, generator=generator)
    return noise.topk(k).indices, 0.5 + torch.rand(ROWS, generator=generator)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("k", [1, K, VOCABULARY])
def test_they_and_their_gradients_are_float64s(monkeypatch, has_bias, k):
    monkeypatch.setattr(OPERATORS, "rows_per_chunk", lambda size: 64)
    hidden, head = make(24, has_bias=has_bias)
    tokens, temperature = told_of(k)
    leaves = [x.requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]
    got = likeliest_log_probs(hidden, head, tokens, temperature)
    want = distribution(hidden, head, VOCABULARY, temperature[:, None]).gather(1, tokens)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    require_close_gradients(got, want, leaves, torch.randn(ROWS, k), atol=1e-4)


def test_a_sampled_token_among_them_has_its_bits_and_another_temperature_has_others():
    hidden, head = make(24)
    tokens, temperature = told_of()
    told = likeliest_log_probs(hidden, head, tokens, temperature)
    for place in (0, K - 1):
        own = token_log_probs(head, hidden, tokens[:, place], temperature)
        assert torch.equal(told[:, place], own.log_probs)
    assert not torch.equal(told, likeliest_log_probs(hidden, head, tokens, temperature + 0.1))


def test_they_are_normalised_over_the_tokens_that_could_be_drawn():
    """Public reports: trl#6789 and NeMo-RL#69, where one side was cut and the other was not."""
    hidden, head = make(24)
    tokens, temperature = told_of(VOCABULARY)
    sets = torch.rand(ROWS, VOCABULARY) < 0.2
    sets[:, 0] = True
    kept = KeptTokens(tuple(packed(sets)))
    told = likeliest_log_probs(hidden, head, tokens, temperature, kept).exp()
    assert torch.equal(told != 0, sets.gather(1, tokens))
    torch.testing.assert_close(told.sum(-1), torch.ones(ROWS))
    whole = likeliest_log_probs(hidden, head, tokens, temperature)
    assert torch.equal(unpacked(kept.sets, VOCABULARY), sets)
    assert not torch.equal(told, whole.exp())


def test_a_row_has_the_same_bits_and_gradient_whatever_rows_are_beside_it():
    hidden, head = make(24)
    tokens, temperature = told_of()
    grad = torch.randn(ROWS, K)
    hidden.requires_grad_()
    whole = likeliest_log_probs(hidden, head, tokens, temperature)
    (of_whole,) = torch.autograd.grad(whole, hidden, grad)
    for row in (slice(7, 8), slice(3, 40)):
        part = hidden[row].detach().requires_grad_()
        alone = likeliest_log_probs(part, head, tokens[row], temperature[row])
        (of_part,) = torch.autograd.grad(alone, part, grad[row])
        assert torch.equal(alone, whole[row]) and torch.equal(of_part, of_whole[row])


def test_they_travel_as_bytes_and_rows_of_a_part_are_theirs():
    ids, values = (
        np.array([[5, 0], [2, 9]], np.int32),
        np.array([[-0.5, -1.5], [0, -9]], np.float32),
    )
    told = LikeliestTokens.of(packed_likeliest(ids, values))
    assert told.tokens.tolist() == ids.tolist() and told.log_probs.tolist() == values.tolist()
    part = told.at(torch.tensor([1]), missing=1)
    assert part.tokens.tolist() == [[2, 9], [0, 0]] and part.log_probs.shape == (2, 2)
    for more in (b"", b"\0\0\0\0"):
        with pytest.raises(ValueError, match="equally many"):
            LikeliestTokens.of([*packed_likeliest(ids, values), more])


def test_sums_of_squared_probabilities_are_float64s_and_of_a_row_alone():
    hidden, head = make(24)
    temperature = told_of()[1]
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double())
    want = (logits / temperature[:, None]).softmax(-1).square().sum(-1)
    found = square_sums(hidden, head, temperature)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-7)
    assert torch.equal(square_sums(hidden[7:8], head, temperature[7:8]), found[7:8])
    one = KeptTokens(tuple(packed(torch.eye(ROWS, VOCABULARY, dtype=torch.bool))))
    assert torch.equal(square_sums(hidden, head, temperature, one), torch.ones(ROWS))
