"""Scope of a recorded call: the running module, and the sharding of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class Together:
    """A gatherer of a call's tensors over a trainer's ranks; this base class gathers nothing.

    Methods are collective: all ranks that share a call call them alike.
    """

    def given(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of operator `name`, with sharded row arguments gathered."""
        return args

    def made(self, name: str, out: Any) -> Any:
        """Return the operator's result gathered: a tensor, or several."""
        return out

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result of `given` with the other arguments gathered too: weights, and row
        offsets."""
        return args


ALL_HERE = Together()


@dataclass(slots=True, kw_only=True)
class Scope:
    """A module that is running."""

    module: str
    """The module's Hugging Face name."""

    fused: Mapping[str, Tensor | None] | None = None
    """The modules that it computes at once, and int64 the columns of its result for each."""

    expert_order: Tensor | None = None
    """int64 [T * k]: in experts, the (token, choice) of each row."""

    first_block: int = 0
    """In experts, the first of this rank's blocks of the sum over their intermediate axis."""

    has_halves: bool = False
    """In experts, whether the first product is gate and up, side by side."""

    chunks: int = 1
    """In attention, the number of equal parts of the rows that are computed one after another."""

    together: Together = ALL_HERE

    counts: Counter[str] = field(default_factory=Counter)

    def number(self, name: str) -> int:
        """Return the index of a call of an operator over all ranks; the chunks of attention count
        as one."""
        is_block = name == "grouped_partial_linear" and self.counts
        count = self.counts[name] + (self.first_block if is_block else 0)
        return count // self.chunks if name == "attention" else count

    def keys(self, name: str, keys: Tensor) -> Tensor:
        """Return the keys of the rows in this call of an operator."""
        if name != "attention":
            return keys
        return keys.chunk(self.chunks)[self.counts[name] % self.chunks]
