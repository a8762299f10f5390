"""The gated delta rule and its convolution: whole sequences against parts, float64, and themselves."""

import pytest
import torch

from onpolicy.contract import DeltaShape
from onpolicy.ops.checks.delta_check import LENS, check_delta
from tests.gpu.row_checks import check_gradients
from tests.support.delta_rule import delta_inputs, exact_rule, packed


def shape(setting):
    """Qwen3-Next's sizes, or small ones in a rehearsal."""
    heads, dim = ((16, 32), 128) if setting.device == "cuda" else ((1, 2), 16)
    return DeltaShape(
        key_heads=heads[0], value_heads=heads[1], key_dim=dim, value_dim=dim, kernel_size=4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sequences_in_parts_have_the_bits_of_whole_ones(operators, setting, tally, dtype):
    with torch.no_grad():
        first, again = (
            list(check_delta(operators, shape(setting), dtype, setting.device)) for _ in range(2)
        )
    for (name, _, result), (*_, repeated) in zip(first, again, strict=True):
        assert result.isfinite().all(), name
        tally.equal(repeated, result, f"{name}, another time")


def test_results_and_gradients_are_right_and_gradients_repeat(operators, setting, tally):
    kind = shape(setting)
    sizes = kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim
    inputs = [x.to(setting.device) for x in delta_inputs(sum(LENS), sizes=sizes)]

    def exact(*given):
        parts = zip(*(x.split(LENS) for x in given), strict=True)
        return torch.cat([exact_rule(*part) for part in parts])

    def rule(*given):
        return operators.gated_delta(*given, packed(*LENS))

    want = exact(*inputs)
    with torch.no_grad():
        tally.close(rule(*inputs), want, 2**-16 * want.abs().max(), "against float64")
    check_gradients(rule, exact, inputs, tally, "gated_delta", 2**-12)
