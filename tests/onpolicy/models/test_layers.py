"""Operators that are aligned in some decoder layers: which side computes in which layer."""

import pytest
import torch

from onpolicy.contract import KINDS, OUTSIDE
from onpolicy.models.layers import decoder_layers, layers_of_modules
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.partial import OPERATORS, partly_aligned
from tests.onpolicy.models.test_policy import load_policy, random_sequences
from tests.support.tiny import make_checkpoint

LAYERS = ("0", "1", OUTSIDE)
SEQUENCES = random_sequences([9, 30])


class Watched:
    """Operators that note in which layer they are called, as `here` says."""

    def __init__(self, here):
        self.seen, operators = set(), CpuOperators(1)
        for name in (name for names in OPERATORS.values() for name in names):
            setattr(self, name, self._noting(getattr(operators, name), here))
        self.rows_per_chunk = operators.rows_per_chunk

    def _noting(self, operator, here):
        def call(*args, **kwargs):
            self.seen.add(here[-1])
            return operator(*args, **kwargs)

        return call


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def policy(request, tmp_path_factory):
    return load_policy(make_checkpoint(tmp_path_factory.mktemp("model"), request.param))


@pytest.fixture
def here(policy):
    """The layer that is running, as the last of a list."""
    running, handles = [OUTSIDE], []
    for name, layer in zip(LAYERS, policy.layers, strict=False):
        enter, leave = lambda *_, name=name: running.append(name), lambda *_: running.pop()
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(lambda *_, leave=leave: leave() and None))
    yield running
    for handle in handles:
        handle.remove()


def score(policy):
    with torch.no_grad():
        return policy(PackedTokens.after_prompts(SEQUENCES, [1, 1], 0.7))[0]


@pytest.mark.parametrize("layers", [("0",), ("1",), (OUTSIDE,), ("0", OUTSIDE), LAYERS])
def test_each_layer_is_computed_by_its_own_side(policy, here, layers):
    aligned, stock = Watched(here), Watched(here)
    policy.use(partly_aligned(aligned, stock, KINDS, layers))
    score(policy)
    assert aligned.seen == set(layers)
    assert stock.seen == set(LAYERS) - set(layers)


def test_other_operators_are_told_nothing_afterwards(policy):
    for operators, hooks in (
        (partly_aligned(CpuOperators(1), CpuOperators(1), KINDS, ("1",)), [1, 1]),
        (partly_aligned(CpuOperators(1), CpuOperators(1), KINDS, ("0",)), [1, 1]),
        (partly_aligned(CpuOperators(1), CpuOperators(1), KINDS), [0, 0]),
        (CpuOperators(1), [0, 0]),
    ):
        policy.use(operators)
        assert [len(layer._forward_pre_hooks) for layer in policy.layers] == hooks


def test_every_layer_by_one_side_has_the_bits_of_that_side(policy):
    policy.use(CpuOperators(1))
    want = score(policy)
    policy.use(partly_aligned(CpuOperators(1), CpuOperators(1), KINDS, LAYERS))
    assert torch.equal(score(policy), want)


def test_a_layer_is_known_by_the_place_in_its_list(policy):
    decoder = policy.causal_lm.base_model
    assert decoder_layers(decoder) is decoder_layers(policy.causal_lm) is decoder.layers
    layers = layers_of_modules(policy.causal_lm)
    assert layers[decoder.layers[1].self_attn.q_proj] == "1"
    outside = (decoder.embed_tokens, decoder.norm, policy.causal_lm.lm_head, decoder)
    assert {layers[module] for module in outside} == {OUTSIDE}
