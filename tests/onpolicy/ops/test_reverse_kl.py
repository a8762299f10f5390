"""The reverse KL to a teacher over the vocabulary: float64's, and exactly 0 where nothing differs."""

from itertools import pairwise

import pytest
import torch

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.log_probs import Head, VocabParallel
from onpolicy.ops.reverse_kl import ToldTeacher, TopKTeacher, WholeTeacher, reverse_kl

OPERATORS = CpuOperators(1)
ROWS, VOCABULARY = 150, 300


def make(inner, vocabulary=VOCABULARY, seed=0, has_bias=False):
    """(hidden states [150, inner], a head, which maps logits by tanh if it has a bias)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, inner, generator=generator)
    weight = torch.randn(vocabulary, inner, generator=generator) / 2
    bias = torch.randn(vocabulary, generator=generator) if has_bias else None
    finish = (lambda x: 3 * torch.tanh(x / 3)) if has_bias else lambda x: x
    return hidden, Head(OPERATORS, weight, bias, VocabParallel(vocabulary), finish)


def teacher_of(kind, hidden, head, vocabulary=VOCABULARY):
    if kind == "full":
        return WholeTeacher(hidden, head)
    return TopKTeacher.of(hidden, head, kind, vocabulary)


def distribution(hidden, head, width, temperature=1):
    bias = None if head.bias is None else head.bias.double()
    logits = torch.nn.functional.linear(hidden.double(), head.weight.double(), bias)
    return torch.log_softmax(head.finish(logits)[:, :width] / temperature, -1)


def require_close_gradients(got, want, leaves, grad, atol):
    pairs = zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(want, leaves, grad.double()),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


def reference(student, teacher, kind, width=VOCABULARY):
    """In float64, from the definition: cells of a distribution are summed first."""
    p, q = (distribution(*each, width) for each in (student, teacher))
    if kind != "full":
        top = q.topk(kind, dim=-1).indices
        rest = torch.ones_like(p).scatter(1, top, 0).bool()
        p, q = (
            torch.cat(
                [x.gather(1, top), x.masked_fill(~rest, -torch.inf).logsumexp(-1)[:, None]], 1
            )
            for x in (p, q)
        )
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("kind", ["full", 5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("teachers", [VOCABULARY, VOCABULARY - 40, VOCABULARY + 40])
def test_it_and_its_gradients_are_float64s(monkeypatch, kind, has_bias, teachers):
    """In chunks of rows, and with vocabularies that are padded to different sizes."""
    monkeypatch.setattr(OPERATORS, "rows_per_chunk", lambda size: 64)
    hidden, head = make(24, has_bias=has_bias)
    taught = make(16, teachers, seed=1, has_bias=has_bias)
    leaves = [x.requires_grad_() for x in (hidden, head.weight, head.bias) if x is not None]
    got = reverse_kl(hidden, head, teacher_of(kind, *taught))
    want = reference((hidden, head), taught, kind, min(VOCABULARY, teachers))
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert got.min() > 0.01
    require_close_gradients(got, want, leaves, torch.randn(ROWS), atol=1e-5)


@pytest.mark.parametrize("kind", ["full", 1, 5, VOCABULARY - 1])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_a_teacher_that_says_the_same_has_0_and_teaches_0_to_the_bit(kind, scale):
    """Also where all but a few tokens have no probability; one logit that is off is seen."""
    hidden, head = make(24)
    hidden = (scale * hidden).requires_grad_()
    head.weight.requires_grad_()
    same = teacher_of(kind, hidden.detach().clone(), head)
    kl = reverse_kl(hidden, head, same)
    grads = torch.autograd.grad(kl.sum(), [hidden, head.weight])
    assert torch.equal(kl, torch.zeros(ROWS))
    assert not any(x.any() for x in grads)
    off = head.weight.detach().clone()
    off[teacher_of(1, hidden.detach(), head).tokens[0, 0]] *= 1 + 1e-3
    other = Head(OPERATORS, off, None, head.vocabulary)
    assert reverse_kl(hidden, head, teacher_of(kind, hidden.detach(), other)).any()


def test_what_a_server_says_of_its_likeliest_tokens_is_the_same_kl():
    """The others are what these leave of 1, where they are not told; 0 to the bit for the same model."""
    (hidden, head), teacher = make(24), make(16, seed=1)
    for given, count in ((teacher, 5), ((hidden, head), VOCABULARY - 1)):
        known = teacher_of(count, *given)
        told = ToldTeacher(known.tokens, known.log_probs)
        found = reverse_kl(hidden, head, told)
        want = reverse_kl(hidden, head, known)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, torch.zeros(ROWS)) == (given is not teacher)


def test_a_teachers_likeliest_tokens_say_no_more_than_all_of_them():
    student, teacher = make(24), make(16, seed=1)
    found = [reverse_kl(*student, teacher_of(kind, *teacher)) for kind in (1, 8, 64, "full")]
    for fewer, more in pairwise(found):
        assert (fewer <= more + 1e-6).all() and (fewer < more).any()


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it():
    student, teacher = make(24), make(16, seed=1)
    for kind in ("full", 5):
        whole = reverse_kl(*student, teacher_of(kind, *teacher))
        rows = torch.tensor([7])
        alone = teacher_of(kind, *teacher).at(rows)
        assert torch.equal(reverse_kl(student[0][rows], student[1], alone), whole[rows])


def test_no_number_that_is_not_finite_is_summed_away():
    (hidden, head), teacher = make(24), make(16, seed=1)
    hidden[3, 0] = torch.nan
    kl = reverse_kl(hidden, head, teacher_of("full", *teacher))
    assert kl.isnan().nonzero().tolist() == [[3]]
