"""The causal convolution: its maths, its bits in any packing and in parts, its gradient."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from tests.support.delta_rule import extension, packed

OPERATORS = CpuOperators(1)
CHANNELS, TAPS = 37, 4


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT, BIAS = numbers(CHANNELS, TAPS, seed=1), numbers(CHANNELS, seed=2)


def exact(x, weight, bias):
    """Of one sequence, by PyTorch."""
    padded = F.pad(x.t(), (weight.shape[1] - 1, 0))[None]
    return F.conv1d(padded, weight[:, None], bias, groups=x.shape[1])[0].t()


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 50])
def test_it_computes_pytorchs_convolution(tokens, bias):
    x = numbers(tokens, CHANNELS)
    got = OPERATORS.causal_conv(x, WEIGHT, bias, packed(tokens))
    torch.testing.assert_close(got, exact(x, WEIGHT, bias))


def empty_states(slots, dtype=torch.float32):
    return torch.full((slots, TAPS - 1, CHANNELS), float("nan"), dtype=dtype)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_token_has_the_same_bits_however_it_comes(lens, random, dtype):
    """Packed with any others, in parts of any size, shorter ones than the convolution among them."""
    weight = WEIGHT.to(dtype)
    each = [numbers(n, CHANNELS, seed=seed, dtype=dtype) for seed, n in enumerate(lens)]
    alone = [OPERATORS.causal_conv(x, weight, None, packed(len(x))) for x in each]
    out = OPERATORS.causal_conv(torch.cat(each), weight, None, packed(*lens))
    assert torch.equal(out, torch.cat(alone))
    states, done = empty_states(len(lens) + 2, dtype), [0] * len(lens)
    while live := [i for i, n in enumerate(lens) if done[i] < n]:
        some = random.sample(live, random.randint(1, len(live)))
        counts = [min(random.randint(1, 6), lens[i] - done[i]) for i in some]
        spans = [each[i][done[i] : done[i] + n] for i, n in zip(some, counts, strict=True)]
        layout = extension(counts, [done[i] for i in some], [i + 1 for i in some])
        got = OPERATORS.causal_conv(torch.cat(spans), weight, None, layout, states)
        for i, n, part in zip(some, counts, got.split(counts), strict=True):
            assert torch.equal(part, alone[i][done[i] : done[i] + n])
            done[i] += n
    assert states[[0, -1]].isnan().all()  # nobody's slots


def test_a_chunk_shorter_than_the_convolution_keeps_its_inputs_in_its_own_slot():
    """vllm-project/vllm pull request 56196: they went into the shared prefix's slot."""
    x = numbers(8, CHANNELS)
    states = empty_states(3)
    OPERATORS.causal_conv(x[:5], WEIGHT, None, extension([5], [0], [0]), states)
    prefix = states[0].clone()
    for slot in (1, 2):  # two requests go on from the prefix, one token at a time
        states[slot] = states[0]
        for t in range(5, 8):
            layout = extension([1], [t], [slot])
            got = OPERATORS.causal_conv(x[t : t + 1], WEIGHT, None, layout, states)
            assert torch.equal(got, OPERATORS.causal_conv(x, WEIGHT, None, packed(8))[t : t + 1])
    assert torch.equal(states[0], prefix) and torch.equal(states[1], x[5:])


def test_control_inputs_held_off_by_one_differ():
    x, states = numbers(8, CHANNELS), empty_states(1)
    OPERATORS.causal_conv(x[:5], WEIGHT, None, extension([5], [0], [0]), states)
    states = states.roll(1, dims=1)
    got = OPERATORS.causal_conv(x[5:], WEIGHT, None, extension([3], [5], [0]), states)
    want = OPERATORS.causal_conv(x, WEIGHT, None, packed(8))[5:]
    assert [torch.equal(*pair) for pair in zip(got, want, strict=True)] == [False] * 3


def test_packed_sequences_do_not_leak_into_one_another():
    """NVIDIA-NeMo/Automodel pull request 2147: a sample's last inputs reached the next one's first."""
    x = numbers(9, CHANNELS)
    out = OPERATORS.causal_conv(x, WEIGHT, None, packed(5, 4))
    leaked = OPERATORS.causal_conv(x, WEIGHT, None, packed(9))
    assert torch.equal(out[5:], OPERATORS.causal_conv(x[5:], WEIGHT, None, packed(4)))
    assert not torch.equal(out[5:8], leaked[5:8]) and torch.equal(out[8:], leaked[8:])


def test_its_gradient_is_pytorchs():
    lens = (1, 2, 30, 3)
    leaves = [numbers(sum(lens), CHANNELS).requires_grad_()]
    leaves += [x.clone().requires_grad_() for x in (WEIGHT, BIAS)]
    grad = numbers(sum(lens), CHANNELS, seed=5)
    got = torch.autograd.grad(OPERATORS.causal_conv(*leaves, packed(*lens)), leaves, grad)
    of_torch = torch.cat([exact(x, *leaves[1:]) for x in leaves[0].split(lens)])
    for of, want in zip(got, torch.autograd.grad(of_torch, leaves, grad), strict=True):
        torch.testing.assert_close(of, want, rtol=1e-4, atol=1e-5)
