"""Operators whose linears of rounded inputs multiply bytes, on a CPU: by the stand-in for DeepGEMM."""

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.hopper import gemm
from onpolicy.ops.hopper.gemm import Fp8Linears
from onpolicy.ops.row_parallel import tree_sum
from tests.support.recorded_kernels import deep_gemm

FORMATS = {"rollout_weight_format": "fp8_e4m3_block128", "rollout_activation_format": "fp8_e4m3"}

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 2}
"""Of a model whose linears are whole blocks on up to two tensor-parallel ranks."""


class OfRounded(Fp8Linears, CpuOperators):
    """Its linears multiply bytes."""


class BytesOnCpu(CpuOperators):
    """Its linears of rounded inputs do."""

    def __init__(self, num_threads=1):
        super().__init__(num_threads)
        self._of_rounded = OfRounded(num_threads)

    @property
    def of_rounded(self):
        return self._of_rounded


def add_blocks(terms, bias, out_dtype):
    """What Triton's kernel gives, where nothing interprets it."""
    total = tree_sum(terms)
    return (total if bias is None else total + bias.float()).to(out_dtype)


def stand_in(monkeypatch, version="0.2.5"):
    """Put it in DeepGEMM's place; returns what grows by its calls."""
    calls = []
    module = deep_gemm(version, calls)
    monkeypatch.setattr(gemm, "loaded", lambda: module)
    monkeypatch.setattr(gemm, "add_blocks", add_blocks)
    return calls
