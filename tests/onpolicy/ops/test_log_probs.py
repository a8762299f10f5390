import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.log_probs import token_log_probs
from onpolicy.ops.low_rank import Factors

OPERATORS = CpuOperators(1)


def inputs(tokens, vocabulary, inner=24, has_bias=False):
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    hidden = torch.randn(tokens, inner, generator=generator)
    weight = torch.randn(vocabulary, inner, generator=generator)
    bias = torch.randn(vocabulary, generator=generator) if has_bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    temperature = torch.rand(tokens, generator=generator) + 0.5
    return hidden, weight, bias, targets, temperature


def reference(hidden, weight, bias, targets, temperature):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature[:, None]
    everything = torch.log_softmax(logits, -1)
    entropy = -(everything.exp() * everything).sum(-1)
    return everything.gather(1, targets[:, None])[:, 0], entropy


@given(st.integers(1, 200), st.integers(2, 300), st.booleans())
def test_values_and_gradients_are_close_to_autograd(tokens, vocabulary, has_bias):
    hidden, weight, bias, targets, temperature = inputs(tokens, vocabulary, has_bias=has_bias)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    got, entropy, _ = token_log_probs(OPERATORS, hidden, weight, bias, targets, temperature)
    want, want_entropy = reference(hidden, weight, bias, targets, temperature)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, rtol=1e-4, atol=1e-5)
    grad, of_entropy = torch.randn(2, tokens)
    for ours, theirs in (
        (grad * got, grad * want),
        (of_entropy * entropy, of_entropy * want_entropy),
        (grad * got + of_entropy * entropy, grad * want + of_entropy * want_entropy),
    ):
        found = torch.autograd.grad(ours.sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad(theirs.sum(), leaves, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@given(st.integers(1, 200), st.integers(2, 300))
def test_an_adapter_alone_has_gradients_and_the_weight_beside_it_none(tokens, vocabulary):
    hidden, weight, bias, targets, temperature = inputs(tokens, vocabulary)
    a, b = torch.randn(3, 24), torch.randn(vocabulary, 3)
    leaves = [t.requires_grad_() for t in (hidden, a, b)]
    adapter = Factors(a, b, 0.3)
    got = token_log_probs(OPERATORS, hidden, weight, bias, targets, temperature, adapter=adapter)
    updated = weight + 0.3 * b @ a
    want = reference(hidden, updated, bias, targets, temperature)
    for ours, theirs in zip(got[:2], want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        grad = torch.randn(tokens)
        found = torch.autograd.grad((grad * ours).sum(), leaves, retain_graph=True)
        expected = torch.autograd.grad((grad * theirs).sum(), leaves, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_a_weight_that_is_not_trained_has_no_gradient(monkeypatch):
    hidden, weight, *others = inputs(9, 7)
    trained = weight.clone().requires_grad_()
    expected, *_ = torch.autograd.grad(
        token_log_probs(OPERATORS, hidden.requires_grad_(), trained, *others)[0].sum(),
        [hidden, trained],
    )
    monkeypatch.setattr(OPERATORS, "linear_gradients", None)
    token_log_probs(OPERATORS, hidden, weight, *others)[0].sum().backward()
    assert torch.equal(hidden.grad, expected) and weight.grad is None


def test_the_gradient_of_an_entropy_that_no_loss_has_is_not_computed(monkeypatch):
    asked, compute = [], OPERATORS.grad_logits

    def grad_logits(logits, temperature, targets, grad, grad_entropy=None):
        asked.append(grad_entropy is not None)
        return compute(logits, temperature, targets, grad, grad_entropy)

    monkeypatch.setattr(OPERATORS, "grad_logits", grad_logits)
    hidden, *others = inputs(3, 7)
    scores = token_log_probs(OPERATORS, hidden.requires_grad_(), *others)
    scores.log_probs.sum().backward(retain_graph=True)
    (scores.log_probs - scores.entropy).sum().backward()
    assert asked == [False, True]


@given(st.integers(1, 200), st.integers(2, 300), st.integers(1, 5000))
def test_chunk_size_does_not_change_bits(tokens, vocabulary, logits_per_chunk):
    arguments = inputs(tokens, vocabulary)
    whole, *_ = token_log_probs(OPERATORS, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        rows = max(16, logits_per_chunk // vocabulary)
        patch.setattr(OPERATORS, "rows_per_chunk", lambda size: rows)
        assert torch.equal(token_log_probs(OPERATORS, *arguments)[0], whole)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest result of any operation."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.numel())
        return result


def test_no_tensor_grows_with_tokens_times_vocabulary(monkeypatch):
    """Forward and backward: the largest tensor is a chunk or a gradient, not [T, V]."""
    tokens, vocabulary, inner = 8000, 3000, 8
    monkeypatch.setattr(OPERATORS, "rows_per_chunk", lambda size: 64)
    hidden, weight, bias, targets, temperature = inputs(tokens, vocabulary, inner)
    hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as largest:
        got, *_ = token_log_probs(OPERATORS, hidden, weight, bias, targets, temperature)
        got.sum().backward()
    assert largest.size < tokens * vocabulary / 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(1, 200), st.integers(2, 600), st.booleans())
def test_a_chunk_adds_the_very_gradients_of_its_linear(dtype, tokens, vocabulary, has_bias):
    hidden, weight, bias, *_ = inputs(tokens, vocabulary, has_bias=has_bias)
    x, *head = [t.to(dtype).requires_grad_() for t in (hidden, weight, bias) if t is not None]
    grad = torch.randn(tokens, vocabulary).to(dtype)
    sums = [torch.randn(t.shape) for t in head]
    of_x, *of_head = torch.autograd.grad(OPERATORS.linear(x, *head), [x, *head], grad)
    want = [total + part for total, part in zip(sums, of_head, strict=True)]
    with torch.no_grad():
        got = OPERATORS.linear_gradients(grad, x, head, grad, sums)
    assert torch.equal(got, of_x) and all(map(torch.equal, sums, want))
