"""The modules of low-rank adapters: the common base, and the adapter of all experts of a layer.

Experts have a pair of factors for each expert and matrix. Gate and up, which transformers holds in
one matrix, share one pair, as in PEFT's `target_parameters`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onpolicy.contract import AdapterShape
from onpolicy.models.experts import expert_sizes
from onpolicy.ops.experts import ExpertFactors
from onpolicy.ops.low_rank import Factors


class LowRankModule(nn.Module):
    """The base of adapters, which add to one or more products of a model while they are on."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.is_on = scale, True


class Pair(nn.Module):
    """The two factors of one adapter, where a module has several."""

    def __init__(self, a: Tensor, b: Tensor):
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)


class ExpertLowRank(LowRankModule):
    """The adapter of a layer's experts, or of a tensor-parallel rank's part of them.

    gate_up.A: [E, r, H]; gate_up.B: [E, 2, I / P, r]; down.A: [E, r, I / P]; down.B: [E, H, r].
    """

    def __init__(self, like: Tensor, sizes: tuple[int, int, int], shape: AdapterShape):
        """Create zero factors with the dtype and device of `like`; sizes: E, I / P and H."""
        super().__init__(shape.scale)
        (count, inner, hidden), rank = sizes, shape.rank
        # Gate and up have separate axes, so that a rank's part of both is one block of B.
        new = like.new_zeros
        self.gate_up = Pair(new(count, rank, hidden), new(count, 2, inner, rank))
        self.down = Pair(new(count, rank, inner), new(count, hidden, rank))

    @property
    def factors(self) -> ExpertFactors:
        return ExpertFactors(self._factors(self.gate_up), self._factors(self.down))

    def _factors(self, pair: Pair) -> Factors:
        return Factors(pair.A, pair.B.flatten(1, -2), self.scale)


def expert_adapter_size(experts: Any, adapter: AdapterShape) -> int:
    """Return the number of elements in the adapters of a layer's experts."""
    count, inner, hidden = expert_sizes(experts)
    return count * adapter.rank * (2 * hidden + 3 * inner)
