"""What the rows of a weight with magnitudes are multiplied by, where their products are (DoRA,
`onpolicy/models/magnitude.py`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gained(
    total: Tensor, gain: Tensor | None, bias: Tensor | None, experts: Tensor | None
) -> Tensor:
    """float32 [..., N], times the gain, [N], but for the bias in it, [N]; as it is without a gain.

    experts: int64 [...]; gain and bias are [E, N] then, and a row has those of its expert.
    """
    if gain is None:
        return total
    if experts is not None:
        gain = of_experts(gain, experts)
        bias = None if bias is None else of_experts(bias, experts)
    total = total * gain
    return total if bias is None else total + (1 - gain) * bias.float()


def of_experts(numbers: Tensor, experts: Tensor) -> Tensor:
    """Those of each row's expert: [E, N], int64 [S] -> float32 [S, N], the dtype gradients are summed
    in."""
    return F.embedding(experts, numbers.float())
