"""Log-probabilities and samples in Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.log_probs import token_log_probs
from onpolicy.ops.triton import TritonOperators
from tests.support.heads import whole_head

OPERATORS = TritonOperators()

few = settings(max_examples=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
rows, columns = st.integers(1, 12), st.sampled_from([2, 137, 4096, 9001])


def inputs(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    temperature = torch.rand(rows, 1, generator=generator) + 0.5
    return logits, temperature, torch.randint(0, columns, (rows,), generator=generator)


@few
@given(rows, columns, dtypes)
def test_a_tokens_log_probability_has_the_bits_of_the_whole_distribution(rows, columns, dtype):
    logits, temperature, targets = inputs(rows, columns, dtype)
    everything = OPERATORS.log_softmax(logits, temperature)
    chosen, entropy = OPERATORS.gather_log_probs(logits, temperature, targets)
    assert torch.equal(chosen, everything.gather(1, targets[:, None])[:, 0])
    exact = torch.log_softmax(logits.double() / temperature.double(), -1)
    torch.testing.assert_close(everything.double(), exact, rtol=1e-6, atol=1e-5)
    exact_entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-5)


@few
@given(rows, columns, dtypes)
def test_gradients_of_logits_are_close_to_float64(rows, columns, dtype):
    logits, temperature, targets = inputs(rows, columns, dtype)
    exact = logits.double().requires_grad_()
    everything = torch.log_softmax(exact / temperature.double(), -1)
    grad = torch.randn(rows)
    chosen = everything.gather(1, targets[:, None])[:, 0]
    (want,) = torch.autograd.grad(chosen, exact, grad.double(), retain_graph=True)
    tolerance = {"rtol": 1e-4 if dtype == torch.float32 else 1e-2, "atol": 1e-6}
    for operators in (OPERATORS, CpuOperators()):
        got = operators.grad_logits(logits, temperature, targets, grad)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **tolerance)
    of_entropy = torch.randn(rows)
    entropy = -(everything.exp() * everything).sum(-1)
    loss = (grad * chosen + of_entropy * entropy).sum()
    (want,) = torch.autograd.grad(loss, exact, retain_graph=True)
    for operators in (OPERATORS, CpuOperators()):
        got = operators.grad_logits(logits, temperature, targets, grad, of_entropy)
        torch.testing.assert_close(got.double(), want, rtol=tolerance["rtol"], atol=1e-5)
    grads = torch.randn(rows, columns)
    (want,) = torch.autograd.grad(everything, exact, grads.double())
    leaf = logits.requires_grad_()
    OPERATORS.log_softmax(leaf, temperature).backward(grads)
    torch.testing.assert_close(leaf.grad.double(), want, rtol=1e-2, atol=1e-2)


def test_log_probabilities_straight_from_hidden_states():
    """Values are those of the rollout's steps, gradients those of float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 24, generator=generator, requires_grad=True)
    weight = torch.randn(137, 24, generator=generator, requires_grad=True)
    targets = torch.randint(0, 137, (20,), generator=generator)
    temperature = torch.full((20,), 0.7)
    got, *_ = token_log_probs(whole_head(OPERATORS, weight), hidden, targets, temperature)
    for row in range(20):
        logits = OPERATORS.linear(hidden[row : row + 1], weight)
        step = OPERATORS.log_softmax(logits, temperature[:1, None])
        assert torch.equal(step[0, targets[row]], got[row])
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    want = torch.log_softmax(exact[0] @ exact[1].t() / 0.7, -1).gather(1, targets[:, None])[:, 0]
    grad = torch.randn(20)
    ours = torch.autograd.grad(got, (hidden, weight), grad)
    for a, b in zip(ours, torch.autograd.grad(want, exact, grad.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_masked_logits_have_no_weight_and_invalid_ones_show():
    logits = torch.tensor([[1.0, -torch.inf, 1.0], [1.0, torch.nan, 1.0]])
    log_probs = OPERATORS.log_softmax(logits, torch.ones(2, 1))
    assert torch.equal(log_probs[0].exp(), torch.tensor([0.5, 0, 0.5]))
    assert log_probs[1].isnan().all()
    _, entropy = OPERATORS.gather_log_probs(logits, torch.ones(2, 1), torch.zeros(2, dtype=int))
    torch.testing.assert_close(entropy[0].item(), math.log(2))


def test_a_chunk_without_weight_adds_nothing_and_what_is_invalid_in_it_shows():
    logits, temperature, targets = inputs(5, 9001, torch.float32)
    logits[:, 4096:8192] = -torch.inf
    logits[1:, :] -= 200 * (torch.arange(9001) >= 8192)  # whose weight is 0 beside the others
    logits[2, 9000], logits[3, 5000], logits[4] = torch.nan, torch.inf, -torch.inf
    log_probs = OPERATORS.log_softmax(logits, temperature)
    _, entropy = OPERATORS.gather_log_probs(logits, temperature, targets)
    exact = torch.log_softmax(logits.double() / temperature.double(), -1)
    torch.testing.assert_close(log_probs[:2].double(), exact[:2], rtol=1e-6, atol=1e-5)
    of_exact = -(exact.exp() * exact).nan_to_num(neginf=0, nan=0).sum(-1)
    torch.testing.assert_close(entropy[:2].double(), of_exact[:2], rtol=1e-5, atol=1e-5)
    assert log_probs[2:].isnan().any(1).all() and entropy[2:].isnan().all()


@few
@given(rows, columns)
def test_samples_are_those_of_the_default(rows, columns):
    logits, temperature, _ = inputs(rows, columns, torch.float32)
    log_probs = CpuOperators().log_softmax(logits, temperature)
    uniform = torch.rand(rows, dtype=torch.float64)
    want = CpuOperators().sample(log_probs, uniform)
    assert torch.equal(OPERATORS.sample(log_probs, uniform), want)


def test_the_smallest_and_the_largest_uniform_number_draw_a_possible_token():
    log_probs = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(2, -1)
    uniform = torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64)
    assert OPERATORS.sample(log_probs, uniform).tolist() == [0, 3]


@few
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=300), st.integers(0, 2**40))
def test_uniform_numbers_are_those_of_the_default(seeds, position):
    seeds = torch.tensor(seeds)
    positions = position + torch.arange(len(seeds))
    got, want = OPERATORS.uniform(seeds, positions), CpuOperators().uniform(seeds, positions)
    assert torch.equal(got, want) and got.min() >= 0 and got.max() < 1
    assert not torch.equal(got, OPERATORS.uniform(seeds, positions + 1))


def test_a_token_is_drawn_wherever_its_chunk_and_next_to_a_border():
    """One probable token in all of a vocabulary of 3 chunks."""
    size = 2 * 1024 + 100
    columns = torch.tensor([0, 1023, 1024, 2047, 2048, size - 1])
    log_probs = torch.full((len(columns), size), -80.0)
    log_probs[torch.arange(len(columns)), columns] = 0.0
    for number in (1e-6, 0.5, 1 - 1e-6):
        uniform = torch.full((len(columns),), number, dtype=torch.float64)
        assert torch.equal(OPERATORS.sample(log_probs, uniform), columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_heads_gradient_is_left_in_float32_for_the_sum_over_chunks(dtype):
    """Rounded chunk by chunk, small gradients would be lost beside a large one."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((64, 16), (32, 16), (32,), (64, 32))
    )
    of_head = [torch.zeros(like.shape) for like in (weight, bias)]
    of_x = OPERATORS.linear_gradients(x, x, [weight, bias], grad, of_head)
    assert of_x.dtype == dtype
    exact = grad.double().t() @ x.double(), grad.double().sum(0)
    for got, want in zip(of_head, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_x.double(), grad.double() @ weight.double(), rtol=0.01, atol=0.1)


def test_every_chunk_adds_to_it(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (130, 32))
    weight.requires_grad_()
    chunks = []

    def counted(self, out, x, *args):
        chunks.append(len(x))
        return plain(self, out, x, *args)

    plain = TritonOperators.linear_gradients
    monkeypatch.setattr(TritonOperators, "linear_gradients", counted)
    monkeypatch.setattr(OPERATORS, "rows_per_chunk", lambda size: 64)
    targets = torch.randint(0, 32, (130,), generator=generator)
    out, *_ = token_log_probs(whole_head(OPERATORS, weight), hidden, targets, torch.ones(130))
    (got,) = torch.autograd.grad(out.sum(), weight)
    assert chunks == [64, 64, 2]
    every = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])
    (want,) = torch.autograd.grad(every.sum(), weight)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
