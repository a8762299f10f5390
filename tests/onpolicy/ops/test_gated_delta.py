"""The gated delta rule on a CPU: its maths, its bits in any packing and in parts, its gradient."""

import sys
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from onpolicy.contract import DELTA_CHUNK
from onpolicy.errors import ContractError
from onpolicy.ops import recurrence
from onpolicy.ops.cpu import CpuOperators, delta_rule
from onpolicy.ops.linears import Linears
from onpolicy.ops.recurrence import DeltaState, state_rows
from onpolicy.ops.stock import StockOperators
from tests.support.delta_rule import delta_inputs, exact_rule, extension, packed, rows_of

RULE = sys.modules[delta_rule.__module__]
OPERATORS, THREADED = CpuOperators(1), CpuOperators(2)
SIZES = (2, 4, 16, 24)
KEY_DIM = SIZES[2]


def empty_states(slots, sizes=SIZES):
    _, values, dim, value_dim = sizes
    return torch.full((slots, values, state_rows(dim, value_dim), value_dim), float("nan"))


def whole(inputs, operators=OPERATORS):
    """The result of one sequence, and its states in the end."""
    states = empty_states(1)
    layout = extension([len(inputs[0])], [0], [0])
    return operators.gated_delta(*inputs, layout, states), states[0]


def of_transformers(rule, inputs):
    q, k, *rest = inputs
    q, k = (x.repeat_interleave(2, dim=1) for x in (q, k))
    out, _ = rule(*(x[None] for x in (q, k, *rest)), use_qk_l2norm_in_kernel=True)
    return out[0]


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_it_computes_the_rule_of_transformers(tokens):
    inputs = delta_inputs(tokens)
    got = OPERATORS.gated_delta(*inputs, packed(tokens))
    torch.testing.assert_close(got, exact_rule(*inputs).float(), rtol=0, atol=1e-6)
    for rule in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        torch.testing.assert_close(got, of_transformers(rule, inputs), rtol=0, atol=1e-5)


def test_stock_operators_compute_it_too():
    threads, inputs = torch.get_num_threads(), delta_inputs(100)
    try:
        got = StockOperators().gated_delta(*inputs, packed(70, 30))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got, OPERATORS.gated_delta(*inputs, packed(70, 30)))


def test_operators_without_the_rule_say_so():
    class Ruleless(CpuOperators):
        _delta_ways = Linears._delta_ways

    with pytest.raises(ContractError, match="Ruleless: has no gated delta rule"):
        Ruleless(1).gated_delta(*delta_inputs(3), packed(3))


lengths = st.lists(st.integers(1, 150), min_size=1, max_size=4)


@settings(max_examples=25)
@given(
    lengths,
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(2, 4, 16, 24), (1, 3, 5, 7), (3, 3, 40, 8)]),
)
@example([150, 64, 1, 65], Random(0), torch.float32, (2, 4, 16, 24))
def test_a_token_has_the_same_bits_however_it_comes(lens, random, dtype, sizes):
    """Packed with any others in any order, in parts of any size, on any number of threads."""
    each = [delta_inputs(n, seed, sizes, dtype) for seed, n in enumerate(lens)]
    alone = [OPERATORS.gated_delta(*x, packed(len(x[0]))) for x in each]
    order = random.sample(range(len(lens)), len(lens))
    together = [torch.cat(parts) for parts in zip(*(each[i] for i in order), strict=True)]
    for operators in (OPERATORS, THREADED):
        out = operators.gated_delta(*together, packed(*(lens[i] for i in order)))
        assert torch.equal(out, torch.cat([alone[i] for i in order]))
    states, done = empty_states(len(lens) + 2, sizes), [0] * len(lens)
    while live := [i for i, n in enumerate(lens) if done[i] < n]:
        some = random.sample(live, random.randint(1, len(live)))
        counts = [min(random.choice([1, 2, 16, 40, 70]), lens[i] - done[i]) for i in some]
        parts = [rows_of(each[i], done[i], n) for i, n in zip(some, counts, strict=True)]
        layout = extension(counts, [done[i] for i in some], [i + 1 for i in some])
        given = map(torch.cat, zip(*parts, strict=True))
        got = OPERATORS.gated_delta(*given, layout, states)
        for i, n, part in zip(some, counts, got.split(counts), strict=True):
            assert torch.equal(part, alone[i][done[i] : done[i] + n])
            done[i] += n
    assert states[[0, -1]].isnan().all()  # nobody's slots


@settings(max_examples=10)
@given(st.integers(1, 140), st.integers(0, 139))
def test_states_are_a_function_of_the_tokens(tokens, cut):
    """So an engine may copy them, and compare them: whole, or token by token from a cut on."""
    inputs, cut = delta_inputs(tokens), min(cut, tokens)
    _, want = whole(inputs)
    states = empty_states(3)
    spans = [(0, cut), *((t, 1) for t in range(cut, tokens))] if cut else [(0, tokens)]
    for first, count in spans:
        layout = extension([count], [first], [1])
        OPERATORS.gated_delta(*rows_of(inputs, first, count), layout, states)
    assert want.isfinite().all() and torch.equal(states[1], want)
    rest = DeltaState.of(want, KEY_DIM)
    assert not any(x[:, tokens % DELTA_CHUNK :].any() for x in (rest.u, rest.k, rest.g))


def continued(inputs, states, cut, past=None):
    """The results from `cut` on after these states, which are said to hold `past` tokens."""
    rest = rows_of(inputs, cut, len(inputs[0]) - cut)
    layout = extension([len(rest[0])], [cut if past is None else past], [0])
    return OPERATORS.gated_delta(*rest, layout, states[None].clone())


def after(inputs, cut):
    return whole(rows_of(inputs, 0, cut))[1]


def recomputed_elsewhere(states, count):
    """The state of a sequence as if a chunk ended at its token `count`: the same in exact numbers."""
    s, u, k, g = (x[:, :count] if i else x for i, x in enumerate(DeltaState.of(states, KEY_DIM)))
    last = g[:, -1:]
    keys = k * (last - g).exp()[..., None]
    moved = torch.zeros_like(states)
    DeltaState.of(moved, KEY_DIM).s.copy_(last[..., None].exp() * s + keys.transpose(1, 2) @ u)
    return moved


@pytest.mark.parametrize("cut", [10, 64, 100])
def test_control_a_state_rounded_to_bfloat16_differs(cut):
    inputs = delta_inputs(130)
    want, states = whole(inputs)[0][cut:], after(inputs, cut)
    assert torch.equal(continued(inputs, states, cut), want)
    rounded = continued(inputs, states.bfloat16().float(), cut)
    assert rounded.isfinite().all() and not torch.equal(rounded, want)


def test_control_a_prefix_recomputed_with_chunks_elsewhere_differs():
    inputs, cut = delta_inputs(130), 40
    want = whole(inputs)[0][cut:]
    moved = continued(inputs, recomputed_elsewhere(after(inputs, cut), cut), cut, past=DELTA_CHUNK)
    torch.testing.assert_close(moved, want, rtol=0, atol=1e-5)
    assert not torch.equal(moved, want)


@contextmanager
def chunks_of(tokens):
    """Chunks of another length."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (recurrence, RULE):
            patch.setattr(module, "DELTA_CHUNK", tokens)
        patch.setattr(RULE, "BLOCKS", tokens // RULE.BLOCK)
        RULE._distances.cache_clear()
        yield
    RULE._distances.cache_clear()


def test_control_another_length_of_chunks_differs():
    inputs = delta_inputs(130)
    want, _ = whole(inputs)
    with chunks_of(32):
        short, _ = whole(inputs)
    torch.testing.assert_close(short, exact_rule(*inputs).float(), rtol=0, atol=1e-6)
    assert torch.equal(short[:32], want[:32]) and not torch.equal(short, want)


def test_control_tokens_in_another_order_differ():
    inputs = delta_inputs(70)
    flipped = [x.flip(0) for x in inputs]
    assert not torch.equal(whole(inputs)[0][-1], whole(flipped)[0][-1])


def gradients(inputs, grad, *lens, operators=OPERATORS):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = operators.gated_delta(*leaves, packed(*lens))
    return torch.autograd.grad(out, leaves, grad)


def exact_gradients(inputs, grad, *lens):
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lens) for x in leaves), strict=True)
    out = torch.cat([exact_rule(*part) for part in parts])
    return torch.autograd.grad(out, leaves, grad.double())


def numbers_like(x, seed=7):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lens", [(1,), (63,), (64,), (65, 1, 130)])
@pytest.mark.parametrize("sizes", [(2, 4, 16, 24), (1, 1, 32, 8)])
def test_its_gradient_is_that_of_the_rule(lens, sizes):
    inputs = delta_inputs(sum(lens), sizes=sizes)
    grad = numbers_like(inputs[2])
    pairs = zip(gradients(inputs, grad, *lens), exact_gradients(inputs, grad, *lens), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want.float(), rtol=0, atol=5e-6)


def test_a_sequences_gradient_depends_on_no_other_sequence_and_no_thread():
    lens = (130, 1, 64, 65)
    inputs = delta_inputs(sum(lens))
    grad = numbers_like(inputs[2])
    want = gradients(inputs, grad, *lens)
    for got in (gradients(inputs, grad, *lens, operators=THREADED), gradients(inputs, grad, *lens)):
        assert all(map(torch.equal, got, want))
    first = 0
    for count in lens:
        alone = gradients(rows_of(inputs, first, count), grad[first : first + count], count)
        assert all(map(torch.equal, alone, rows_of(want, first, count)))
        first += count


def test_control_a_gradient_of_another_sequence_differs():
    inputs = delta_inputs(70)
    grad = numbers_like(inputs[2])
    changed = [x.clone() for x in inputs]
    changed[2][0] += 1e-3
    pairs = zip(gradients(inputs, grad, 70), gradients(changed, grad, 70), strict=True)
    assert not all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("large", [30.0, 400.0])
def test_a_strong_decay_overflows_nowhere(large):
    """fla-org/flash-linear-attention issue 99, pull request 463: exp(G_i - G_j) of later keys.

    What is left is the rounding of G itself, which is large here.
    """
    inputs = delta_inputs(140, decay=large)
    grad = numbers_like(inputs[2])
    got = OPERATORS.gated_delta(*inputs, packed(140))
    torch.testing.assert_close(got, exact_rule(*inputs).float(), rtol=0, atol=3e-4)
    pairs = zip(gradients(inputs, grad, 140), exact_gradients(inputs, grad, 140), strict=True)
    for of, want in pairs:
        torch.testing.assert_close(of, want.float(), rtol=0, atol=3e-4)


def test_packed_sequences_do_not_leak_into_one_another():
    """THUDM/slime pull request 1686, pytorch/torchtitan pull request 3892: one state for all."""
    inputs, cut = delta_inputs(90), 50
    out = OPERATORS.gated_delta(*inputs, packed(cut, 40))
    alone = OPERATORS.gated_delta(*rows_of(inputs, cut, 40), packed(40))
    assert torch.equal(out[cut:], alone)
    assert not torch.equal(OPERATORS.gated_delta(*inputs, packed(90))[cut:], alone)


def test_keys_of_zeros_have_a_finite_gradient():
    """AI-Hypercomputer/maxtext pull request 5295: the norm's slope where a row is padding."""
    inputs = delta_inputs(70)
    for x in inputs[:2]:
        x[3:9] = 0
    grad = numbers_like(inputs[2])
    for got, want in zip(
        gradients(inputs, grad, 70), exact_gradients(inputs, grad, 70), strict=True
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
