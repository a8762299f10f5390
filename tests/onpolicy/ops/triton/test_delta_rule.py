"""The gated delta rule and the causal convolution in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.recurrence import causal_conv, state_rows
from onpolicy.ops.triton import TritonOperators, delta_rule
from tests.support.delta_rule import delta_inputs, exact_rule, extension, packed

OPERATORS = TritonOperators()

few = settings(max_examples=2)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
# Key heads, value heads, key size, value size: the last has two blocks of values.
shapes = st.sampled_from([(1, 1, 16, 16), (1, 2, 24, 20), (2, 2, 16, 40)])
LENS = (70, 20)
"""A sequence whose second chunk has begun, and one that ends inside a tile."""


def rule_inputs(tokens, shape, dtype=torch.float32, seed=0):
    return delta_inputs(tokens, tokens + seed, shape, dtype)


def empty_states(slots, shape):
    """States that are NaN, as a slot may be that another request has left."""
    _, heads, dim, value_dim = shape
    return torch.full((slots, heads, state_rows(dim, value_dim), value_dim), torch.nan)


def whole_rule(inputs, lens):
    return OPERATORS.gated_delta(*inputs, packed(*lens))


def feed(operator, inputs, lens, calls, states, slots):
    """Results of all tokens, fed in calls of {sequence: new tokens}, in the order of each."""
    starts, done = [sum(lens[:i]) for i in range(len(lens))], [0] * len(lens)
    out = None
    for call in calls:
        spans = [
            torch.arange(starts[i] + done[i], starts[i] + done[i] + n) for i, n in call.items()
        ]
        rows = torch.cat(spans)
        layout = extension(call.values(), [done[i] for i in call], [slots[i] for i in call])
        got = operator([x[rows] for x in inputs], layout, states)
        out = got.new_full((sum(lens), *got.shape[1:]), torch.nan) if out is None else out
        out[rows] = got
        for i, n in call.items():
            done[i] += n
    assert tuple(done) == lens
    return out


def fed_rule(inputs, calls, states, lens=LENS, slots=(2, 0)):
    def rule(given, layout, held):
        return OPERATORS.gated_delta(*given, layout, held)

    return feed(rule, inputs, lens, calls, states, slots)


def calls_of(data, lens):
    """Any calls that feed all tokens, several sequences at a time, in any order."""
    left, calls = list(lens), []
    while any(left):
        live = [i for i, n in enumerate(left) if n]
        order = data.draw(st.permutations(live))[: data.draw(st.integers(1, len(live)))]
        kinds = st.sampled_from([1, 3, 17, 48, 64, max(lens)])
        calls.append({i: min(left[i], data.draw(kinds)) for i in order})
        for i, n in calls[-1].items():
            left[i] -= n
    return calls


@few
@given(shapes, dtypes, st.data())
def test_prefixes_and_extensions_in_any_order_equal_whole_sequences(shape, dtype, data):
    inputs, states = rule_inputs(sum(LENS), shape, dtype), empty_states(3, shape)
    whole = whole_rule(inputs, LENS)
    assert whole.dtype == dtype and whole.isfinite().all()
    assert torch.equal(fed_rule(inputs, calls_of(data, LENS), states), whole)
    assert states[1].isnan().all()  # another request's


def test_token_by_token_equals_a_whole_sequence():
    shape, lens = (1, 1, 16, 16), (68,)
    inputs = rule_inputs(68, shape)
    calls = [{0: 1}] * 19 + [{0: 41}] + [{0: 1}] * 8
    got = fed_rule(inputs, calls, empty_states(1, shape), lens, [0])
    assert torch.equal(got, whole_rule(inputs, lens))


def test_a_slot_that_another_request_has_left_is_as_good_as_new():
    shape, lens = (1, 1, 16, 16), (66,)
    first, second = rule_inputs(66, shape), rule_inputs(66, shape, seed=1)
    states = empty_states(1, shape)
    for inputs in (first, second):
        got = fed_rule(inputs, [{0: 5}, {0: 61}], states, lens, [0])
        assert torch.equal(got, whole_rule(inputs, lens))


@few
@given(shapes, dtypes)
def test_a_sequence_depends_on_no_other(shape, dtype):
    inputs = rule_inputs(sum(LENS), shape, dtype)
    first, last = whole_rule(inputs, LENS).split(LENS)
    for whole, part in ((first, slice(0, LENS[0])), (last, slice(LENS[0], None))):
        alone = whole_rule([x[part] for x in inputs], (len(whole),))
        assert torch.equal(alone, whole)


@few
@given(shapes)
def test_results_and_gradients_are_close_to_float64(shape):
    leaves = [x.requires_grad_() for x in rule_inputs(sum(LENS), shape)]
    got = whole_rule(leaves, LENS)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    parts = zip(*(x.split(LENS) for x in exact), strict=True)
    want = torch.cat([exact_rule(*part) for part in parts])
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    ours = torch.autograd.grad(got, leaves, grad)
    for a, b in zip(ours, torch.autograd.grad(want, exact, grad.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-5 * b.abs().max().item())


def test_results_are_close_to_those_of_the_cpu():
    shape = (1, 2, 24, 20)
    inputs = rule_inputs(sum(LENS), shape, torch.bfloat16)
    want = CpuOperators(1).gated_delta(*inputs, packed(*LENS))
    torch.testing.assert_close(whole_rule(inputs, LENS), want, rtol=2e-2, atol=1e-3)


def test_a_chunk_of_another_length_has_other_bits(monkeypatch):
    inputs = rule_inputs(70, (1, 1, 16, 16))
    whole = whole_rule(inputs, (70,))
    monkeypatch.setattr(delta_rule, "DELTA_CHUNK", 32)
    other = whole_rule(inputs, (70,))
    assert torch.equal(other[:16], whole[:16]) and not torch.equal(other, whole)
    torch.testing.assert_close(other, whole)


@pytest.mark.parametrize("past", [40, 64])
def test_a_state_rounded_to_bfloat16_has_other_bits(past):
    """The keys and corrections of a chunk that has begun, and the state of one that is complete."""
    shape, lens = (1, 1, 16, 16), (70,)
    inputs, states = rule_inputs(70, shape), empty_states(1, shape)

    def rule(given, layout, held):
        held.copy_(held.bfloat16())
        return OPERATORS.gated_delta(*given, layout, held)

    got = feed(rule, inputs, lens, [{0: past}, {0: 70 - past}], states, [0])
    whole = whole_rule(inputs, lens)
    assert torch.equal(got[:past], whole[:past]) and not torch.equal(got, whole)


def test_a_prefix_whose_chunks_begin_elsewhere_has_other_bits():
    """An engine that would count positions from its own call, 5 tokens late."""
    shape = (1, 1, 16, 16)
    inputs, states = rule_inputs(70, shape), empty_states(1, shape)
    late = extension([65], [64], [0])
    fed_rule([x[:5] for x in inputs], [{0: 5}], states, (5,), [0])
    whole = whole_rule(inputs, (70,))
    assert not torch.equal(OPERATORS.gated_delta(*(x[5:] for x in inputs), late, states), whole[5:])


def convolve(taps, bias):
    def convolution(given, layout, held):
        weight = torch.linspace(-1, 1, 7 * taps).view(7, taps).to(given[0].dtype)
        offset = torch.linspace(1, 2, 7).to(given[0].dtype) if bias else None
        return OPERATORS.causal_conv(*given, weight, offset, layout, held)

    return convolution


@settings(max_examples=8)
@given(st.integers(1, 5), st.booleans(), dtypes, st.data())
def test_the_convolution_has_the_bits_of_pytorch_in_any_calls(taps, bias, dtype, data):
    lens = (37, 5)
    x = torch.randn(42, 9, generator=torch.Generator().manual_seed(taps)).to(dtype)[:, 1:8]
    convolution = convolve(taps, bias)
    with torch.enable_grad():
        want = convolution([x], packed(*lens), None)  # PyTorch's kernels, for the gradient
    with torch.no_grad():
        assert torch.equal(convolution([x], packed(*lens), None), want)
    states = torch.full((3, taps - 1, 7), torch.nan, dtype=dtype)
    got = feed(convolution, [x], lens, calls_of(data, lens), states, (2, 0))
    assert torch.equal(got, want)
    assert taps == 1 or states[1].isnan().all()


def test_a_convolution_that_loses_an_input_has_other_bits():
    x = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    convolution, states = convolve(4, False), torch.zeros(1, 3, 7)
    whole = convolution([x], packed(9), None)

    def forgetful(given, layout, held):
        held[:, 0] = 0
        return convolution(given, layout, held)

    got = feed(forgetful, [x], (9,), [{0: 4}, {0: 5}], states, [0])
    assert torch.equal(got[:4], whole[:4]) and not torch.equal(got, whole)
    assert torch.equal(whole, causal_conv(x, torch.linspace(-1, 1, 28).view(7, 4), None,
                                          packed(9), None))  # fmt: skip
