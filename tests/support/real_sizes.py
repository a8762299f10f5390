"""The checks at start-up, and their negative controls, at the sizes of Qwen3-0.6B and of a
gated delta network of Qwen3.5. Run by hand:

    python -m pytest tests/support/real_sizes.py -s            # minutes; 1.5 GB

and under other instruction sets, such as ATEN_CPU_CAPABILITY=default.
"""

import resource
import time
from dataclasses import replace

import pytest

from onpolicy.contract import AttentionShape, DeltaShape, NumericsContract, OperatorShapes
from onpolicy.errors import ContractError
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.cpu import CpuOperators
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
