"""A model with gated delta networks on the Triton operators, in Triton's interpreter."""

import pytest
import torch

from onpolicy.models.align import replace_operators
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.triton import TritonOperators
from tests.onpolicy.models.test_policy import load_policy
from tests.support import decode_loop
from tests.support.tiny import make_checkpoint
from tests.support.violations import break_operator

pytestmark = pytest.mark.long

SEQUENCES = [[*range(2, 68)], [5, 6, 9, 8]]
"""The first goes from one chunk into the next while it decodes token by token."""


class Interpreted(TritonOperators):
    """Kernels on a CPU, whose PyTorch maps an element otherwise where it is among the last ones."""

    def elementwise(self, function, x):
        return CpuOperators(1).elementwise(function, x)


@pytest.fixture
def decoded_by(monkeypatch, tmp_path):
    """The trainer's log-probabilities, and those of a decode loop by the given operators."""
    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    path = make_checkpoint(tmp_path, "qwen3.5", **sizes)
    policy = load_policy(path, Interpreted(), torch.bfloat16)
    monkeypatch.setattr(decode_loop, "CHUNK", 62)
    monkeypatch.setattr(decode_loop, "ALONE", 3)  # the interpreter is slow
    with torch.no_grad():
        packed = policy(PackedTokens.after_prompts(SEQUENCES, [1, 1], 0.7))[0]

    def decoded(engine):
        replace_operators(policy, engine)
        return packed, torch.cat(decode_loop.decode_log_probs(policy, engine, SEQUENCES, 0.7))

    return decoded


def test_training_and_decoding_agree_and_a_broken_rule_is_found(decoded_by):
    packed, decoded = decoded_by(Interpreted())
    assert packed.isfinite().all() and torch.equal(packed, decoded)
    packed, decoded = decoded_by(break_operator(Interpreted(), "gated_delta"))
    assert not torch.equal(packed, decoded)
