"""Drawing tokens: by seed and position alone, from exactly the given distribution."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.uniform_numbers import GAMMA, splitmix64, uniform_numbers

INT64 = st.integers(-(2**63), 2**63 - 1)
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
"""The generator's first outputs from state 0, as published with it."""


def draw(log_probs, seeds, positions):
    return CpuOperators().sample(log_probs, uniform_numbers(seeds, positions))


def log_probs_of(seed, rows, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(4 * torch.randn(rows, vocabulary, generator=generator), -1)


def test_the_hash_is_splitmix64():
    states = torch.tensor([0, GAMMA, GAMMA]) + torch.tensor([0, 0, GAMMA])
    assert [x % (1 << 64) for x in splitmix64(states).tolist()] == SPLITMIX64


@given(seed=INT64, position=st.integers(0, 2**40))
def test_uniform_numbers_lie_in_their_interval(seed, position):
    (value,) = uniform_numbers(torch.tensor([seed]), torch.tensor([position])).tolist()
    assert 0 <= value < 1


@given(
    rows=st.integers(1, 30), vocabulary=st.integers(1, 300), seed=st.integers(0, 99), cut=st.data()
)
def test_a_token_does_not_depend_on_the_other_rows(rows, vocabulary, seed, cut):
    log_probs = log_probs_of(seed, rows, vocabulary)
    seeds, positions = torch.arange(rows) * 7919 + seed, torch.arange(rows)
    together = draw(log_probs, seeds, positions)
    keep = slice(cut.draw(st.integers(0, rows - 1)), rows)
    assert torch.equal(draw(log_probs[keep], seeds[keep], positions[keep]), together[keep])
    assert torch.equal(draw(log_probs.flip(0), seeds.flip(0), positions.flip(0)), together.flip(0))
