"""The aligned operators, chosen by the contract: one implementation serves both engines."""

from onpolicy.contract import NumericsContract
from onpolicy.ops.base import AttentionLayout, Operators

__all__ = ["AttentionLayout", "Operators", "make_operators"]


def make_operators(contract: NumericsContract, num_threads: int = 1) -> Operators:
    """The operators that keep `contract` in this process, on `num_threads` CPU threads."""
    if contract.backend == "cpu":
        from onpolicy.ops.cpu import CpuOperators

        return CpuOperators(num_threads)
    from onpolicy.ops.stock import StockOperators

    return StockOperators(num_threads)
