"""A model with gated delta networks on the Triton operators, in Triton's interpreter."""

import pytest
import torch

from onpolicy.models.align import replace_operators
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.triton import TritonOperators
from tests.onpolicy.models.test_policy import load_policy
from tests.support.decode_loop import decode_log_probs
from tests.support.tiny import make_checkpoint
from tests.support.violations import break_operator

pytestmark = pytest.mark.long

SEQUENCES = [[*range(2, 70)], [5, 6, 9, 8]]
"""The first goes from one chunk into the next while it decodes token by token."""


def packed_and_decoded(path, operators, engine):
    policy = load_policy(path, operators, torch.bfloat16)
    tokens = PackedTokens.after_prompts(SEQUENCES, [1, 1], 0.7)
    with torch.no_grad():
        packed = policy(tokens)[0]
    replace_operators(policy, engine)
    return packed, torch.cat(decode_log_probs(policy, engine, SEQUENCES, temperature=0.7))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3.5")


def test_training_and_decoding_agree(path):
    operators = TritonOperators()
    packed, decoded = packed_and_decoded(path, operators, operators)
    assert packed.isfinite().all() and torch.equal(packed, decoded)


@pytest.mark.parametrize("operator", ["gated_delta", "causal_conv"])
def test_an_operator_that_depends_on_the_batch_is_found(path, operator):
    engine = break_operator(TritonOperators(), operator)
    packed, decoded = packed_and_decoded(path, TritonOperators(), engine)
    assert not torch.equal(packed, decoded)
