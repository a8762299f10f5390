import dataclasses

import pytest
import torch
from torch import Tensor

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ContractError
from onpolicy.ops import make_operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.probe import probe
from onpolicy.ops.self_check import self_check
from onpolicy.ops.stock import StockOperators

CONTRACT = NumericsContract(
    backend="cpu",
    device="cpu",
    dtype="float32",
    shapes=OperatorShapes(
        linear=((208, 96, False), (137, 96, True), (600, 512, False)),
        heads=6,
        kv_heads=2,
        head_dim=48,
        norm=(48, 96),
        vocab_size=137,
        experts=((6, 72, 96, 2),),
    ),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_aligned_operators_pass_with_the_same_digests_on_any_number_of_threads(dtype):
    contract = dataclasses.replace(CONTRACT, dtype=dtype)
    one, two = (self_check(make_operators(contract, n), contract) for n in (1, 2))
    assert one == two
    assert {
        "linear 208x96",
        "linear with bias 137x96",
        "attention 6x2x48",
        "experts 6x72x96x2",
        "log_softmax 137",
    } <= set(one)


def test_digests_tell_different_operators_apart():
    class Rounded(CpuOperators):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().linear(x, weight, bias).bfloat16().to(x.dtype)

    ours, theirs = self_check(CpuOperators(), CONTRACT), self_check(Rounded(), CONTRACT)
    differ = {name for name in ours if ours[name] != theirs[name]}
    router = "experts 6x72x96x2"
    assert differ == {"linear 208x96", "linear with bias 137x96", "linear 600x512", router}


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        ("linear", "linear"),
        ("attention", "attention"),
        ("elementwise", "silu"),
        ("grouped_linear", "experts"),
        ("grouped_partial_linear", "experts"),
    ],
)
def test_one_stock_operator_is_found_and_named(operator, name):
    operators = CpuOperators()
    setattr(operators, operator, getattr(StockOperators(), operator))
    with pytest.raises(ContractError, match=rf"operator={name}, shape=\(.*not row-invariant"):
        self_check(operators, CONTRACT)


def test_probe_is_the_same_whatever_is_asked_after():
    assert torch.equal(probe(4, 8, seed=1).view(-1), probe(32, seed=1))
    assert not torch.equal(probe(32, seed=1), probe(32, seed=2))
    assert probe(100, seed=3).abs().max() <= 1


SHARED = dataclasses.replace(
    CONTRACT,
    row_parallel_blocks=4,
    shapes=dataclasses.replace(
        CONTRACT.shapes, row_linear=((96, 208, True), (96, 1504, False)), kv_heads=6
    ),
)


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
