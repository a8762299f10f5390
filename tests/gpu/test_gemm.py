"""Every linear of Qwen3 0.6B, 4B, 8B and 30B-A3B: a row has the same bits in any call."""

import pytest
import torch

from tests.gpu import gemm_checks
from tests.gpu.row_checks import Numbers
from tests.support.gpu.operators import missing

FLOAT32_SHAPE = (96, 320)


def test_a_row_does_not_depend_on_the_number_of_rows(operators, model, setting, numbers, tally):
    with torch.no_grad():
        for name, (n, k) in model.linears().items():
            case = f"{name} {n}x{k}"
            gemm_checks.check_row_counts(
                operators.linear, n, k, setting.row_counts, numbers, tally, case
            )


def test_a_row_of_an_unrounded_partial_sum_does_not_depend_on_the_number_of_rows(
    operators, model, setting, numbers, tally
):
    """Check row-parallel linears, with all of K and with the eighth that one of 8 blocks has."""
    with torch.no_grad():
        for name in ("o", "down"):
            n, k = model.linears().get(name, (0, 0))
            for blocks in (1, 8) if k else ():
                case = f"{name} {n}x{k // blocks}"
                gemm_checks.check_row_counts(
                    operators.partial_linear, n, k // blocks, setting.few_row_counts, numbers,
                    tally, case,
                )  # fmt: skip


def test_a_shard_of_the_columns_has_the_bits_of_the_whole(
    operators, model, setting, numbers, tally
):
    with torch.no_grad():
        for name, (n, k) in model.linears().items():
            if name not in ("o", "down", "router"):
                case, row_counts = f"{name} {n}x{k}", setting.three_row_counts
                gemm_checks.check_columns(operators.linear, n, k, row_counts, numbers, tally, case)


def test_a_row_with_bias_does_not_depend_on_the_number_of_rows(
    operators, model, setting, numbers, tally
):
    with torch.no_grad():
        for name in ("q", "kv"):
            n, k = model.linears()[name]
            gemm_checks.check_bias(operators, n, k, setting.few_row_counts, numbers, tally)


def test_results_and_gradients_are_right_and_gradients_repeat(operators, model, numbers, tally):
    for name, (n, k) in model.linears().items():
        for kind in ("linear", "partial_linear"):
            gemm = getattr(operators, kind)
            case = f"{kind} {name} {n}x{k}"
            gemm_checks.check_accuracy(gemm, n, k, 70, numbers, tally, case)


@pytest.mark.parametrize("kind", ["grouped_linear", "grouped_partial_linear"])
def test_an_experts_row_does_not_depend_on_the_other_rows(
    operators, model, setting, numbers, tally, kind
):
    if not model.experts:
        pytest.skip(f"{model.name} has no experts")
    with torch.no_grad():
        for name, shape in model.expert_linears().items():
            gemm_checks.check_grouped_rows(
                getattr(operators, kind), shape, setting.row_counts, numbers, tally, name
            )


@pytest.mark.parametrize("kind", ["grouped_linear", "grouped_partial_linear"])
def test_results_and_gradients_of_experts_are_right_and_gradients_repeat(
    operators, model, numbers, tally, kind
):
    if not model.experts:
        pytest.skip(f"{model.name} has no experts")
    for name, shape in model.expert_linears().items():
        gemm_checks.check_grouped_accuracy(
            getattr(operators, kind), shape, 300, numbers, tally, name
        )


def test_float32_operands_are_multiplied_in_float32(operators, backend, setting, tally):
    """Check against a bound that TF32 would break many times over."""
    if setting.device == "cuda" and (problem := missing(backend, "float32")):
        pytest.skip(f"{backend} operators: {problem}")
    numbers = Numbers(torch.float32, setting.device)
    n, k = FLOAT32_SHAPE
    with torch.no_grad():
        gemm_checks.check_row_counts(
            operators.linear, n, k, setting.few_row_counts, numbers, tally, "float32"
        )
    gemm_checks.check_accuracy(operators.linear, n, k, 70, numbers, tally, "float32")
