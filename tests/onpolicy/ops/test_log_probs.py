import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.kept_tokens import ALL, OUTSIDE, Cut, KeptTokens, packed, unpacked, within
from onpolicy.ops.linears import Factors
from onpolicy.ops.log_probs import token_log_probs
from tests.support.heads import whole_head

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
    got, entropy, *_ = token_log_probs(
        whole_head(OPERATORS, weight, bias), hidden, targets, temperature
    )
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
    head = whole_head(OPERATORS, weight, bias, adapter=adapter)
    got = token_log_probs(head, hidden, targets, temperature)
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
    hidden, weight, bias, *others = inputs(9, 7)
    trained = weight.clone().requires_grad_()
    head, frozen = (whole_head(OPERATORS, x, bias) for x in (trained, weight))
    expected, *_ = torch.autograd.grad(
        token_log_probs(head, hidden.requires_grad_(), *others)[0].sum(), [hidden, trained]
    )
    monkeypatch.setattr(OPERATORS, "linear_gradients", None)
    token_log_probs(frozen, hidden, *others)[0].sum().backward()
    assert torch.equal(hidden.grad, expected) and weight.grad is None


def test_the_gradient_of_an_entropy_that_no_loss_has_is_not_computed(monkeypatch):
    asked, compute = [], OPERATORS.grad_logits

    def grad_logits(logits, temperature, targets, grad, grad_entropy=None):
        asked.append(grad_entropy is not None)
        return compute(logits, temperature, targets, grad, grad_entropy)

    monkeypatch.setattr(OPERATORS, "grad_logits", grad_logits)
    hidden, weight, bias, *others = inputs(3, 7)
    scores = token_log_probs(whole_head(OPERATORS, weight, bias), hidden.requires_grad_(), *others)
    scores.log_probs.sum().backward(retain_graph=True)
    (scores.log_probs - scores.entropy).sum().backward()
    assert asked == [False, True]


@given(st.integers(1, 200), st.integers(2, 300), st.integers(1, 5000))
def test_chunk_size_does_not_change_bits(tokens, vocabulary, logits_per_chunk):
    hidden, weight, bias, *others = inputs(tokens, vocabulary)
    arguments = whole_head(OPERATORS, weight, bias), hidden, *others
    whole, *_ = token_log_probs(*arguments)
    with pytest.MonkeyPatch.context() as patch:
        rows = max(16, logits_per_chunk // vocabulary)
        patch.setattr(OPERATORS, "rows_per_chunk", lambda size: rows)
        assert torch.equal(token_log_probs(*arguments)[0], whole)


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
        got, *_ = token_log_probs(whole_head(OPERATORS, weight, bias), hidden, targets, temperature)
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


SETTINGS = {
    "top_k": st.sampled_from([-1, 2, 5, 40]),
    "top_p": st.sampled_from([1.0, 0.05, 0.6, 0.95]),
    "min_p": st.sampled_from([0.0, 0.03, 0.3, 1.0]),
}


def rows(seed, count, size, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(spread * torch.randn(count, size, generator=generator), -1)


def kept(log_probs, top_k=-1, top_p=1.0, min_p=0.0):
    return Cut.of(top_k, top_p, min_p).kept(OPERATORS, log_probs)


@given(st.integers(0, 999), st.integers(1, 9), st.integers(2, 200), st.fixed_dictionaries(SETTINGS))
def test_it_is_the_one_of_transformers_in_its_order(seed, count, size, settings):
    if set(settings.values()) == {-1, 1.0, 0.0}:
        assert Cut.of(**settings) is None
        return
    log_probs = rows(seed, count, size)
    want = log_probs.clone()
    if settings["top_k"] > 0:
        want = TopKLogitsWarper(settings["top_k"])(None, want)
    if settings["top_p"] < 1:
        want = TopPLogitsWarper(settings["top_p"])(None, want)
    if settings["min_p"] > 0:
        want = MinPLogitsWarper(settings["min_p"])(None, want)
    differ = kept(log_probs, **settings) != (want > -torch.inf)
    # Where float32 sums round, theirs may stop a token earlier or later.
    assert differ.sum() <= 1 and differ[log_probs > log_probs.max() - 20].sum() <= 1


def test_top_p_is_of_what_top_k_left():
    log_probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept(log_probs, top_k=2, top_p=0.55).tolist() == [[True, False, False, False]]
    assert kept(log_probs, top_p=0.55).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}])
def test_of_equally_likely_tokens_the_first_are_kept(settings):
    log_probs = torch.full((1, 6), 1 / 6).log()
    assert kept(log_probs, **settings).tolist() == [[True] * 3 + [False] * 3]
    assert kept(log_probs, min_p=1.0).all()


@given(st.integers(0, 99), st.integers(2, 70), st.fixed_dictionaries(SETTINGS))
def test_a_row_is_cut_alone_as_among_others(seed, count, settings):
    log_probs = rows(seed, count, 137, spread=0.2).round(decimals=1)  # many ties
    cut = Cut.of(**settings)
    if cut is not None:
        together = cut.kept(OPERATORS, log_probs)
        order = torch.randperm(count)
        assert torch.equal(cut.kept(OPERATORS, log_probs[order]), together[order])
        assert torch.equal(cut.kept(OPERATORS, log_probs[-1:]), together[-1:])


def test_every_row_has_its_own_settings():
    log_probs = rows(0, 3, 50)
    cut = Cut(
        torch.tensor([[ALL], [4], [9]]),
        torch.tensor([[0.5], [1.0], [0.9]]),
        torch.tensor([[0.0], [0.0], [0.1]]),
    )
    want = [{"top_p": 0.5}, {"top_k": 4}, {"top_k": 9, "top_p": 0.9, "min_p": 0.1}]
    for got, row, settings in zip(cut.kept(OPERATORS, log_probs), log_probs, want, strict=True):
        assert torch.equal(got, kept(row[None], **settings)[0])


@given(st.integers(0, 99), st.integers(1, 400), st.floats(0.001, 1))
def test_sets_come_back_from_bytes_and_are_as_short_as_ids_or_a_mask(seed, size, share):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(7, size, generator=generator) < share
    mask[:, 0] = True
    sets = packed(mask)
    assert torch.equal(unpacked(sets, size), mask)
    for row, each in zip(mask, sets, strict=True):
        assert len(each) == (0 if row.all() else min(4 * int(row.sum()), -(-size // 8)))


def test_a_set_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="ids of a vocabulary of 300 are from 0 to 299"):
        unpacked(packed(torch.arange(5000)[None] >= 4998), 300)


def head(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 24, generator=generator, dtype=dtype)
    weight = torch.randn(70, 24, generator=generator, dtype=dtype)
    temperature = torch.rand(9, generator=generator) + 0.5
    logits = hidden.float() @ weight.float().T / temperature[:, None]
    mask = kept(torch.log_softmax(logits, -1), top_k=30, top_p=0.9)
    targets = torch.multinomial(mask.float(), 1, generator=generator)[:, 0]
    return hidden, weight, targets, temperature, mask


def scores(hidden, weight, targets, temperature, mask, operators=OPERATORS):
    sets = KeptTokens(tuple(packed(mask)))
    return token_log_probs(whole_head(operators, weight), hidden, targets, temperature, sets)


def test_log_probabilities_and_entropy_are_of_what_is_kept():
    hidden, weight, targets, temperature, mask = head()
    got = scores(hidden, weight, targets, temperature, mask)
    logits = (hidden @ weight.T / temperature[:, None]).masked_fill(~mask, -torch.inf)
    want = torch.log_softmax(logits, -1)
    torch.testing.assert_close(got.log_probs, want.gather(1, targets[:, None])[:, 0])
    terms = torch.where(mask, want.exp() * want, torch.zeros(()))
    torch.testing.assert_close(got.entropy, -terms.sum(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_sides_have_the_same_bits(dtype):
    hidden, weight, targets, temperature, mask = head(dtype)
    got = scores(hidden, weight, targets, temperature, mask).log_probs
    logits = within(OPERATORS.linear(hidden, weight), mask)
    engine = OPERATORS.log_softmax(logits, temperature[:, None])
    assert torch.equal(got, engine.gather(1, targets[:, None])[:, 0])
    assert (engine[~mask].exp() == 0).all() and torch.finfo(torch.float32).min < OUTSIDE / 1e-6


def test_gradients_are_those_of_finite_differences():
    hidden, weight, targets, temperature, mask = head()
    weight.requires_grad_()
    scores(hidden, weight, targets, temperature, mask).log_probs.sum().backward()

    def total(values):
        logits = (hidden.double() @ values.T / temperature.double()[:, None]).masked_fill(
            ~mask, -torch.inf
        )
        return torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum()

    exact, step = weight.detach().double(), 1e-6
    for row, column in ((0, 0), (int(targets[0]), 3), (41, 7), (69, 23)):
        change = torch.zeros_like(exact)
        change[row, column] = step
        slope = (total(exact + change) - total(exact - change)) / (2 * step)
        torch.testing.assert_close(weight.grad[row, column].double(), slope, rtol=1e-4, atol=1e-5)
    nowhere_kept = ~mask.any(0)
    assert (weight.grad[nowhere_kept] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_token_that_is_cut_has_a_finite_logit_that_no_other_reaches_in_every_dtype(dtype):
    """In float16 the lowest number, -65504, is one that a model may give."""
    logits = torch.tensor([[-65504.0, 1.0, 2.0]], dtype=dtype)
    cut = within(logits, torch.tensor([[True, True, False]]))
    assert cut[0, 2].isfinite() and cut[0, 2] < cut[0, 0]
    assert torch.equal(cut[0, :2], logits[0, :2].to(cut.dtype))
