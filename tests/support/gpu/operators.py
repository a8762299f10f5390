"""The aligned operators of a GPU backend, for no model in particular."""

from onpolicy.contract import AttentionShape, NumericsContract, OperatorShapes
from onpolicy.ops import make_operators
from onpolicy.ops.backends import Demand, backend_of
from onpolicy.ops.machine import Machine

BACKENDS = ("triton", "hopper")

PARTS = {"deep_gemm": "deep_gemm", "flash_attention_3": "sgl_kernel"}
"""What `hopper` is made of, each of which can be tried without the other, and its module."""

ATTENTION = AttentionShape(heads=32, kv_heads=8, head_dim=128, value_dim=128)
NO_SHAPES = OperatorShapes(linear=(), attention=(ATTENTION,), norm=(), vocab_size=1024)
"""The head size decides whether a backend serves a model."""


def missing(backend, dtype="bfloat16"):
    """What this machine lacks for the backend, by name; None if nothing."""
    demand = Demand(dtype=dtype, shapes=NO_SHAPES, row_parallel_blocks=1)
    return backend_of(backend).refusal(demand, Machine.here())


def make_gpu_operators(backend):
    """The backend's operators; raises ContractError if this machine cannot keep it."""
    return make_operators(
        NumericsContract(backend=backend, device="cuda", dtype="bfloat16", shapes=NO_SHAPES)
    )


def missing_part(part):
    """What this machine lacks for one of PARTS, by name; None if nothing."""
    machine = Machine.here()
    if machine.capability != (9, 0):
        return f"compute capability={machine.capability_name}: made for 9.0 (H100, H200)"
    return machine.lacks(part, (PARTS[part], "triton"))


def make_part(part):
    """The Triton operators, but for what this part of `hopper` computes; raises ContractError."""
    from onpolicy.ops.backends.base import exact_float32
    from onpolicy.ops.hopper import DeepGemmLinears, FlashAttention

    exact_float32()
    return DeepGemmLinears() if part == "deep_gemm" else FlashAttention()


def make_linears_of_bytes():
    """What `hopper_fp8` computes linears of rounded inputs by; raises ContractError."""
    from onpolicy.ops.backends.base import exact_float32
    from onpolicy.ops.hopper import DeepGemmLinears
    from onpolicy.ops.hopper.gemm import Fp8Linears

    class LinearsOfBytes(Fp8Linears, DeepGemmLinears):
        pass

    exact_float32()
    return LinearsOfBytes()
