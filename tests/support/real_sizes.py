"""The checks at start-up, and their negative controls, at the sizes of Qwen3-0.6B and of a
gated delta network of Qwen3.5, and a decoder that sees. Run by hand:

    python -m pytest tests/support/real_sizes.py -s            # minutes; 1.5 GB

and under other instruction sets, such as ATEN_CPU_CAPABILITY=default.
"""

import resource
import time
from dataclasses import replace

import pytest
import torch

from onpolicy.contract import AttentionShape, DeltaShape, NumericsContract, OperatorShapes
from onpolicy.errors import ContractError
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.cpu import CpuOperators
from tests.support.seeing_policies import log_probs, prompt_with, seeing_policy
from tests.support.tiny_images import make_image_checkpoint, picture
from tests.support.violations import break_gradient, break_operator

HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 151936

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(
        linear=(
            (HIDDEN, HIDDEN, False),
            (2 * HIDDEN, HIDDEN, False),
            (HIDDEN, 2 * HIDDEN, False),
            (INTERMEDIATE, HIDDEN, False),
            (HIDDEN, INTERMEDIATE, False),
            (VOCABULARY, HIDDEN, False),
        ),
        attention=(AttentionShape(heads=16, kv_heads=8, head_dim=128, value_dim=128),),
        norm=(128, HIDDEN),
        vocab_size=VOCABULARY,
        delta=(
            DeltaShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128, kernel_size=4),
        ),
    ),
)


SEEING = {
    "text": {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
    },
    "vision": {
        "hidden_size": HIDDEN, "out_hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
        "num_heads": 16, "depth": 2,
    },
}  # fmt: skip
"""Widths of a Qwen3-VL of that size, with two layers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_sees_has_the_same_bits_in_any_company(dtype, tmp_path):
    path = make_image_checkpoint(tmp_path, "qwen3_vl", **SEEING)
    prompts = [
        prompt_with(path, picture(0, (32, 32))),
        prompt_with(path, picture(1, (40, 24)), picture(0), text=range(5, 90), seed=1),
        prompt_with(path, text=range(9, 50)),
    ]
    policy, other = (seeing_policy(path, dtype, threads) for threads in (1, 2))
    alone = [log_probs(policy, prompt)[0] for prompt in prompts]
    together = log_probs(other, *prompts[::-1])[::-1]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    (swapped,) = log_probs(policy, prompt_with(path, picture(2, (32, 32))))
    assert not torch.equal(swapped, alone[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check", [self_check, check_gradients])
def test_aligned_operators_pass(check, dtype):
    contract, start = replace(CONTRACT, dtype=dtype), (time.perf_counter(), time.process_time())
    check(CpuOperators(1), contract)
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"\n{check.__name__} {dtype}: {wall:.1f} s, {cpu:.1f} s of CPU, peak so far {peak} MiB")


@pytest.mark.parametrize(
    "operator",
    [
        "linear", "attention", "paged_attention", "rms_norm", "elementwise", "gated", "rotary",
        "softmax", "log_softmax", "gather_log_probs", "sample", "causal_conv", "gated_delta",
    ],
)  # fmt: skip
def test_an_operator_that_depends_on_the_batch_is_found(operator):
    with pytest.raises(ContractError, match="not row-invariant"):
        self_check(break_operator(CpuOperators(), operator), CONTRACT)


@pytest.mark.parametrize("operator", ["linear", "attention", "rms_norm", "elementwise"])
def test_a_gradient_that_depends_on_the_batch_is_found(operator):
    with pytest.raises(ContractError, match="operator=gradient of"):
        check_gradients(break_gradient(CpuOperators(), operator), CONTRACT)
