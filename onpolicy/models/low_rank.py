"""What all modules of low-rank adapters have in common, whichever products they are beside."""

from __future__ import annotations

from torch import Tensor, nn


class LowRankModule(nn.Module):
    """Adds to a product of a model, or to several, while it is on."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.is_on = scale, True


class Pair(nn.Module):
    """The two factors of one adapter, where a module has several."""

    def __init__(self, a: Tensor, b: Tensor):
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
