"""What all modules of low-rank adapters have in common, whichever products they are beside."""

from __future__ import annotations

from torch import Tensor, nn

from onpolicy.models.magnitude import Magnitude


class LowRankModule(nn.Module):
    """Adds to a product of a model, or to several, while it is on."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.is_on = scale, True


class Pair(nn.Module):
    """The two factors of one adapter, where a module has several, and its magnitudes, if it has any."""

    def __init__(self, a: Tensor, b: Tensor, *, dora: bool):
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.magnitude = Magnitude(b) if dora else None

    @property
    def gain(self) -> Tensor | None:
        """float32, one number for each row of B."""
        return None if self.magnitude is None else self.magnitude(None)
