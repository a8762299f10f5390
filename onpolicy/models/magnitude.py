"""DoRA: the rows of an adapted weight have lengths of their own, which are trained beside A and B.

    W' = m (W + s B A) / ||W + s B A||, row by row

The trainer takes the norms after every step, and each push brings them to the engines beside m. Both
divide in float32, whatever they compute in: on a bfloat16 grid most steps of m would be lost.
Source: Liu et al., DoRA (arXiv 2402.09353), eq. 5, and section 4.3, by which no gradient flows through
the norm; `DoraLinearLayer` of the package peft (0.21).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onpolicy.ops.base import Operators
from onpolicy.ops.low_rank import Factors

ROWS = 1024
"""Rows of a weight that are summed with B A at a time."""


class Magnitude(nn.Module):
    """Gives what the rows of W + s B A are multiplied by: 1, as long as m is their norm."""

    norm: Tensor
    """float32 [N], or a tensor-parallel rank's part: what the trainer has computed"""

    def __init__(self, b: Tensor):
        """b: [N, r], or that of all experts, [E, ..., r], maybe on the meta device; m and the norms have
        one number for each of its rows."""
        super().__init__()
        rows = b.shape[:-1]
        self.m = nn.Parameter(torch.ones(rows, dtype=torch.float32, device=b.device))
        device = "cpu" if b.is_meta else b.device
        self.register_buffer("norm", torch.ones(rows, dtype=torch.float32, device=device))

    def forward(self, _: None) -> Tensor:
        """float32, of the shape of m; of a row of zeros, as of a token that is not used, m, which begins
        as 0.

        Of a module that is given nothing while activations are computed again, FSDP2 of torch 2.11 takes
        the first of no inputs to the GPU.
        """
        return self.m / or_one(self.norm)


def is_magnitude(name: str) -> bool:
    """Whether a parameter or buffer of this name is one of `Magnitude`, and so in float32."""
    return ".magnitude." in name


def or_one(norms: Tensor) -> Tensor:
    """What rows are divided by: their norms, but 1 where that is 0."""
    return norms.where(norms != 0, 1.0)


def row_norms(operators: Operators, weight: Tensor, factors: Factors) -> Tensor:
    """||W + s B A|| of each row, in float32: [N, K] -> [N]; no other row decides its bits."""
    a, b = factors.a.float().T.contiguous(), factors.b.float()
    ones = torch.ones(1, len(a), device=weight.device)
    norms = [torch.empty(0, device=weight.device)]
    for rows in range(0, len(weight), ROWS):
        part = slice(rows, rows + ROWS)
        total = weight[part].float() + operators.linear(b[part], a) * factors.scale
        norms.append(operators.linear(total.square(), ones)[:, 0].sqrt())
    return torch.cat(norms)


def expert_norms(operators: Operators, weight: Tensor, factors: Factors) -> Tensor:
    """`row_norms` of each expert's matrix, in float32: [E, N, K] -> [E, N].

    The factors are a: [E, r, K] and b: [E, N, r].
    """
    norms = torch.empty(weight.shape[:2], device=weight.device)
    for expert, (w, a, b) in enumerate(zip(weight, factors.a, factors.b, strict=True)):
        norms[expert] = row_norms(operators, w, Factors(a, b, factors.scale))
    return norms
