import dataclasses

import pytest
import torch
from torch import Tensor

from onpolicy.contract import NumericsContract, OperatorShapes
from onpolicy.errors import ContractError
from onpolicy.ops import make_operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.self_check import probe, self_check
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
        "log_softmax 137",
    } <= set(one)


def test_digests_tell_different_operators_apart():
    class Rounded(CpuOperators):
        def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return super().linear(x, weight, bias).bfloat16().to(x.dtype)

    ours, theirs = self_check(CpuOperators(), CONTRACT), self_check(Rounded(), CONTRACT)
    differ = {name for name in ours if ours[name] != theirs[name]}
    assert differ == {"linear 208x96", "linear with bias 137x96", "linear 600x512"}


@pytest.mark.parametrize("operator", ["linear", "attention", "elementwise"])
def test_one_stock_operator_is_found_and_named(operator):
    operators = CpuOperators()
    setattr(operators, operator, getattr(StockOperators(), operator))
    name = "silu" if operator == "elementwise" else operator
    with pytest.raises(ContractError, match=rf"operator={name}, shape=\(.*not row-invariant"):
        self_check(operators, CONTRACT)


def test_probe_is_the_same_whatever_is_asked_after():
    assert torch.equal(probe(4, 8, seed=1).view(-1), probe(32, seed=1))
    assert not torch.equal(probe(32, seed=1), probe(32, seed=2))
    assert probe(100, seed=3).abs().max() <= 1
