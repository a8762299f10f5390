"""Rows come back from the experts of two ranks as if these were on one."""

import pytest
import torch
import torch.nn.functional as F

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.mixture_of_experts import expert_outputs, gated_halves
from onpolicy.ops.row_parallel import RowParallel
from tests.support.megatron_ranks import dispatch_rows, expert_weights, loss_of

CHOICES = {
    "both": ([[0, 3], [2, 1], [3, 2]], [[1, 0], [3, 0], [2, 3], [0, 1], [1, 2]]),
    "one rank": ([[0, 1], [1, 0]], [[1, 0], [0, 1], [0, 1]]),
    "one expert": ([[3]], [[3], [3]]),
}


def on_one_rank(experts):
    rows, gate_up, down = expert_weights(experts)
    gate_up.requires_grad_()
    down.requires_grad_()
    results, row_grads = [], []
    operators = CpuOperators(1)
    gate = gated_halves(operators, F.silu)
    for x, choices in zip(rows, experts, strict=True):
        x.requires_grad_()
        chosen = torch.tensor(choices)
        repeated = x.repeat_interleave(chosen.shape[1], 0)
        (result,) = expert_outputs(
            operators, repeated, chosen.reshape(-1), gate_up, down, gate, RowParallel()
        )
        loss_of(result.sum(1)).backward()
        results.append(result.detach())
        row_grads.append(x.grad)
    return results, row_grads, (gate_up.grad, down.grad)


@pytest.mark.parametrize("choices", CHOICES)
def test_results_have_the_same_bits_and_gradients_arrive(two_ranks, choices):
    experts = CHOICES[choices]
    results, row_grads, weight_grads = on_one_rank(experts)
    for rank, (got, row_grad, own) in enumerate(two_ranks.run(dispatch_rows, experts)):
        assert torch.equal(got, results[rank])
        torch.testing.assert_close(row_grad, row_grads[rank])
        for gradient, everything in zip(own, weight_grads, strict=True):
            torch.testing.assert_close(gradient, everything[2 * rank : 2 * rank + 2])
