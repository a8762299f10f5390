"""The trainer's check of its backward passes finds one that depends on the batch."""

import dataclasses

import pytest

from onpolicy.errors import ContractError
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import self_check
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny_contract import CONTRACT, SHARED
from tests.support.violations import break_gradient, break_operator


@pytest.mark.parametrize("contract", [CONTRACT, SHARED], ids=["whole", "in blocks"])
def test_aligned_operators_pass_on_any_number_of_threads(contract):
    for threads in (1, 3):
        check_gradients(CpuOperators(threads), contract)


@pytest.mark.parametrize(
    ("operator", "named"),
    [
        ("linear", "linear, shape=(208, 96)"),
        ("rms_norm", "rms_norm, shape=(48,)"),
        ("layer_norm", "layer_norm, shape=(96,)"),
        ("elementwise", "silu, shape=(37,)"),
        ("softmax", "softmax, shape=(6,)"),
        ("grouped_linear", "experts, shape=(6, 72, 96, 2)"),
        ("grouped_partial_linear", "experts, shape=(6, 72, 96, 2)"),
        ("attention", "attention, shape=(6, 2, 48)"),
    ],
)
def test_a_gradient_that_depends_on_the_batch_is_found_and_named(operator, named):
    operators = break_gradient(CpuOperators(), operator)
    self_check(operators, CONTRACT)  # which has no backward pass
    with pytest.raises(ContractError) as error:
        check_gradients(operators, CONTRACT)
    assert f"operator=gradient of {named}, case=" in str(error.value)


def test_gradients_of_log_probabilities_are_checked():
    operators = break_operator(CpuOperators(), "grad_logits")
    with pytest.raises(ContractError, match=r"gradient of log_softmax, shape=\(137,\)"):
        check_gradients(operators, CONTRACT)


def test_operators_of_a_gpu_promise_less():
    check_gradients(
        break_gradient(CpuOperators(), "linear"), dataclasses.replace(CONTRACT, device="cuda")
    )
