"""The aligned operators, chosen by the contract: both engines use one implementation."""

from onpolicy.contract import ATTENTION_CHUNK, DELTA_CHUNK, FLASH_CHUNK, NumericsContract
from onpolicy.errors import ContractError
from onpolicy.ops.backends import Demand, backend_of
from onpolicy.ops.base import Operators
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.machine import Machine

__all__ = ["AttentionLayout", "Operators", "PagedLayout", "ScoreRule", "make_operators"]


def make_operators(contract: NumericsContract, num_threads: int = 1) -> Operators:
    """Return the operators that keep `contract` in this process, on `num_threads` CPU threads.

    Raise ContractError if this machine cannot keep it, or no backend has the contract's name.
    """
    backend = backend_of(contract.backend)
    for name, chunk in (("attention_chunk", ATTENTION_CHUNK), ("flash_chunk", FLASH_CHUNK)):
        if (asked := getattr(contract, name)) != chunk:
            raise ContractError(
                f"{name}={asked}: attention of this version of onpolicy sums {chunk} keys apart. Start "
                "both engines with the same version."
            )
    if asked := {kind.chunk for kind in contract.shapes.delta} - {DELTA_CHUNK}:
        raise ContractError(
            f"chunk={min(asked)}: the gated delta rule of this version of onpolicy has chunks of "
            f"{DELTA_CHUNK} tokens. Start both engines with the same version."
        )
    demand = Demand(
        dtype=contract.dtype,
        shapes=contract.shapes,
        row_parallel_blocks=contract.row_parallel_blocks,
    )
    if problem := backend.refusal(demand, Machine.here()):
        raise ContractError(f"backend={contract.backend}: {problem}")
    return backend.make(num_threads)
