"""Which module is running while an operator is called, and how what it computes is shared out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class Together:
    """Puts together what the ranks of a trainer share of a call, as one rank with all of it has it.

    Here nothing is shared. Methods are collective: all ranks that share a call call them alike.
    """

    def given(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of operator `name`, those that have rows made whole."""
        return args

    def made(self, name: str, out: Any) -> Any:
        """What it returned: a tensor, or several."""
        return out

    def held(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `given` returned, the other arguments made whole too: weights, and how rows lie."""
        return args


ALL_HERE = Together()


@dataclass(slots=True, kw_only=True)
class Scope:
    """A module that is running."""

    module: str
    """Its Hugging Face name."""

    fused: Mapping[str, Tensor | None] | None = None
    """The modules that it computes at once, and int64: each one's columns of its result."""

    expert_order: Tensor | None = None
    """int64 [T * k]: in experts, the (token, choice) of each row."""

    first_block: int = 0
    """In experts, the first of this rank's blocks of the sum over their intermediate axis."""

    has_halves: bool = False
    """In experts, whether what they compute first is gate and up, side by side."""

    chunks: int = 1
    """In attention, the equal parts of the rows that it computes one after another."""

    together: Together = ALL_HERE

    counts: Counter[str] = field(default_factory=Counter)

    def number(self, name: str) -> int:
        """Which of its calls of an operator this is, on all ranks together; of chunks all are one."""
        is_block = name == "grouped_partial_linear" and self.counts
        count = self.counts[name] + (self.first_block if is_block else 0)
        return count // self.chunks if name == "attention" else count

    def keys(self, name: str, keys: Tensor) -> Tensor:
        """Those of the rows that this call of an operator computes, of the keys of all rows."""
        if name != "attention":
            return keys
        return keys.chunk(self.chunks)[self.counts[name] % self.chunks]
