import dataclasses

import pytest
import torch
from torch import Tensor

from onpolicy.errors import ContractError
from onpolicy.ops import Operators, make_operators
from onpolicy.ops.checks.fixed_numbers import probe
from onpolicy.ops.checks.gradient_check import check_gradients
from onpolicy.ops.checks.self_check import GPU_ROW_COUNTS, gpu_row_counts, self_check
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.mixture_of_experts import mix_experts
from onpolicy.ops.row_parallel import WHOLE
from tests.support.tiny_contract import CONTRACT, SHARED
from tests.support.violations import ROW_OPERATORS, break_operator, few, next_up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_aligned_operators_pass_with_the_same_digests_on_any_number_of_threads(dtype):
    contract = dataclasses.replace(CONTRACT, dtype=dtype)
    one, two = (self_check(make_operators(contract, n), contract) for n in (1, 2))
    assert one == two
    assert {
        "linear 208x96", "linear with bias 137x96", "attention 6x2x48", "experts 6x72x96x2",
        "log_softmax 137",
    } <= set(one)  # fmt: skip


def test_digests_tell_different_operators_apart():
    class Rounded(CpuOperators):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().linear(x, weight, bias).bfloat16().to(x.dtype)

    ours, theirs = self_check(CpuOperators(), CONTRACT), self_check(Rounded(), CONTRACT)
    differ = {name for name in ours if ours[name] != theirs[name]}
    router = "experts 6x72x96x2"
    assert differ == {"linear 208x96", "linear with bias 137x96", "linear 600x512", router}


CONTROLS = {
    "linear": "linear", "attention": "attention", "paged_attention": "paged_attention",
    "elementwise": "silu", "gated": "gated", "add_scaled": "add_scaled", "rotary": "rotary",
    "rms_norm": "rms_norm", "layer_norm": "layer_norm", "softmax": "softmax", "topk": "experts",
    "log_softmax": "log_softmax", "gather_log_probs": "gather_log_probs", "sample": "sample",
    "grouped_linear": "experts", "grouped_partial_linear": "experts",
    "causal_conv": "causal_conv", "gated_delta": "gated_delta",
}  # fmt: skip
"""Operator: what the check calls it, which tries experts as a whole."""


@pytest.mark.parametrize(("operator", "name"), CONTROLS.items())
def test_an_operator_that_depends_on_the_batch_is_found_and_named(operator, name):
    with pytest.raises(ContractError, match=rf"operator={name}, shape=\(.*not row-invariant"):
        self_check(break_operator(CpuOperators(), operator), CONTRACT)


def test_a_product_that_depends_on_the_batch_in_large_tiles_alone_is_found():
    broken = break_operator(CpuOperators(), "linear", lambda rows: rows >= 512)
    with pytest.raises(ContractError, match="operator=linear"):
        self_check(broken, CONTRACT)


def test_every_operator_of_a_rollout_has_a_control():
    """The parts of longer sums have theirs in tests/onpolicy/ops/test_row_parallel.py."""
    assert CONTROLS.keys() == {*ROW_OPERATORS} - {"partial_linear"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_checks_at_start_up_call_every_operator(dtype):
    called = set()

    class Noted(CpuOperators):
        def __getattribute__(self, name: str):
            called.add(name)
            return super().__getattribute__(name)

    contract = dataclasses.replace(SHARED, dtype=dtype)
    self_check(Noted(), contract)
    of_a_backward_pass = {"grad_logits", "linear_gradients", "rows_per_chunk"}
    # Or tried where they are put in, and where sums have one block.
    of_a_trainer = {"run_pieces", "add_rms_norm", "norm_rotary", "mix_few"}
    whole_numbers = {"uniform"}  # of integers, with one result everywhere
    of_a_trainer.add("hold")  # or of an engine
    members = {name: member for name, member in vars(Operators).items() if name[0] != "_"}
    public = {name for name, member in members.items() if not isinstance(member, int | None)}
    assert public - called == of_a_backward_pass | of_a_trainer | whole_numbers
    check_gradients(Noted(), contract)
    of_others = {"linear_gradients"} | of_a_trainer  # see test_log_probs.py
    assert public - called == of_others | whole_numbers


@pytest.mark.parametrize("off_by", [0.0, 1e-6])
def test_a_mixture_in_few_kernels_must_have_the_bits_of_the_one_in_many(off_by):
    class Few(CpuOperators):
        def mix_few(self, x, experts, weights, gate_up, down, gate):
            given = self, x, experts, weights, gate_up, down, gate, WHOLE
            return mix_experts(*given, in_few_kernels=False) + off_by

    contract = dataclasses.replace(CONTRACT, dtype="float32", row_parallel_blocks=1)
    assert contract.shapes.experts
    if not off_by:
        assert self_check(Few(), contract)
        return
    with pytest.raises(ContractError, match=r"operator=experts.*kernels of more rows"):
        self_check(Few(), contract)


def test_sums_are_checked_before_bfloat16_rounds_their_differences_away():
    class Hidden(CpuOperators):
        """Rounds float32 sums of few rows up wherever bfloat16 is the same for both."""

        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            exact = super().linear(
                x.float(), weight.float(), None if bias is None else bias.float()
            )
            up = next_up(exact)
            hidden = torch.where(up.bfloat16() == exact.bfloat16(), up, exact)
            return (hidden if few(len(x)) else exact).to(x.dtype)

    contract = dataclasses.replace(CONTRACT, dtype="bfloat16")
    self_check(CpuOperators(), contract)
    with pytest.raises(ContractError, match="operator=linear"):
        self_check(Hidden(), contract)


class WithBytes(CpuOperators):
    """Operators whose linears of rounded inputs are others."""

    def __init__(self, of_rounded):
        super().__init__()
        self._of_rounded = of_rounded

    @property
    def of_rounded(self):
        return self._of_rounded


@pytest.mark.parametrize("broken", ["linear", "partial_linear"])
def test_linears_of_bytes_are_checked_at_the_shapes_that_are_whole_blocks(broken):
    shapes = dataclasses.replace(
        SHARED.shapes,
        linear=((256, 128, False), (137, 128, False), (128, 96, True)),
        row_linear=((128, 512, False), (96, 512, False)),
    )
    contract = dataclasses.replace(SHARED, shapes=shapes, row_parallel_blocks=2)
    digests = self_check(WithBytes(CpuOperators()), contract)
    found = {name for name in digests if "of bytes" in name}
    assert found == {"linear of bytes 256x128", "row-parallel linear of bytes 128x512"}
    assert not [name for name in self_check(CpuOperators(), contract) if "of bytes" in name]
    with pytest.raises(ContractError, match=r"linear, shape=\(.*not row-invariant"):
        self_check(WithBytes(break_operator(CpuOperators(), broken)), contract)


def test_probe_is_the_same_whatever_is_asked_after():
    assert torch.equal(probe(4, 8, seed=1).view(-1), probe(32, seed=1))
    assert not torch.equal(probe(32, seed=1), probe(32, seed=2))
    assert probe(100, seed=3).abs().max() <= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_all_operators_pass_and_sums_over_ranks_have_digests(dtype):
    contract = dataclasses.replace(SHARED, dtype=dtype)
    digests = self_check(CpuOperators(), contract)
    assert {"row-parallel linear with bias 96x208", "row-parallel linear 96x1504"} <= set(digests)


def test_digests_tell_other_numbers_of_blocks_apart():
    """In float32: short sums of bfloat16 probes are exact in any order."""
    fewer = dataclasses.replace(SHARED, row_parallel_blocks=2)
    four, two = (self_check(CpuOperators(), contract) for contract in (SHARED, fewer))
    differ = {name for name in four if four[name] != two[name]}
    assert "row-parallel linear with bias 96x208" in differ
    assert all(name.startswith(("row-parallel linear", "experts")) for name in differ)


class DependsOnColumns(CpuOperators):
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias) + len(weight) % 2


class DependsOnHeads(CpuOperators):
    def attention(self, q: Tensor, *others: object) -> Tensor:
        return super().attention(q, *others) + (q.shape[1] == 6)


class DependsOnBlocks(CpuOperators):
    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().partial_linear(x, weight) + weight.is_contiguous()


@pytest.mark.parametrize(
    ("operators", "named"),
    [
        (DependsOnColumns, r"operator=linear, shape=\(\d+, 96\).*of the columns"),
        (DependsOnHeads, r"operator=attention, shape=\(6, 6, 48\).*3 of the heads"),
        (DependsOnBlocks, r"operator=row-parallel linear, shape=\(96, 208\).*4 ranks"),
    ],
)
def test_an_operator_whose_parts_differ_from_the_whole_is_found_and_named(operators, named):
    with pytest.raises(ContractError, match=named):
        self_check(operators(), SHARED)
    without = dataclasses.replace(SHARED.shapes, row_linear=())
    self_check(operators(), dataclasses.replace(SHARED, row_parallel_blocks=1, shapes=without))


def test_a_gpu_is_checked_up_to_the_longest_prefill_or_micro_batch():
    assert gpu_row_counts(0, 1 << 20) == GPU_ROW_COUNTS
    assert gpu_row_counts(48, 1 << 20) == GPU_ROW_COUNTS
    assert gpu_row_counts(8192, 1 << 20) == (*GPU_ROW_COUNTS, 6144, 8192)
    assert gpu_row_counts(9000, 1 << 20) == (*GPU_ROW_COUNTS, 6144, 8192, 9000)
    assert gpu_row_counts(5000, 1 << 20) == (*GPU_ROW_COUNTS, 5000)


def test_but_not_beyond_what_memory_holds():
    assert gpu_row_counts(8192, 1766)[-2:] == (511, 1024)
    assert gpu_row_counts(8192, 10)[-1] == 299
