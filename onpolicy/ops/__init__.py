"""The aligned operators, chosen by the contract: one implementation serves both engines."""

import torch

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.ops.base import AttentionLayout, Operators
from onpolicy.ops.capability import Machine, refusal

__all__ = ["AttentionLayout", "Operators", "make_operators"]


def make_operators(contract: NumericsContract, num_threads: int = 1) -> Operators:
    """The operators that keep `contract` in this process, on `num_threads` CPU threads.

    Raises ContractError if this machine cannot keep it.
    """
    if contract.backend == "cpu":
        from onpolicy.ops.cpu import CpuOperators

        return CpuOperators(num_threads)
    if contract.is_aligned:
        return _gpu_operators(contract)
    from onpolicy.ops.stock import StockOperators

    return StockOperators(num_threads)


def _gpu_operators(contract: NumericsContract) -> Operators:
    problem = refusal(
        contract.backend,
        contract.dtype,
        contract.shapes,
        contract.row_parallel_blocks,
        Machine.here(),
    )
    if problem:
        raise ContractError(f"backend={contract.backend}: {problem}")
    # What no operator stands for, such as the product of positions and rotary frequencies.
    torch.set_float32_matmul_precision("highest")
    if contract.backend == "hopper":
        from onpolicy.ops.hopper import HopperOperators

        return HopperOperators()
    from onpolicy.ops.triton import TritonOperators

    return TritonOperators()
