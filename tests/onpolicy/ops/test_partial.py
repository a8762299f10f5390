"""Operators of a partial contract: which side answers which operator."""

import dataclasses

import pytest
import torch

from onpolicy.contract import KINDS
from onpolicy.ops import make_operators
from onpolicy.ops.base import Operators
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.partial import OPERATORS, aligned_side, partly_aligned
from onpolicy.ops.stock import StockOperators
from tests.support.tiny_contract import CONTRACT

COMPOSED = {"add_rms_norm", "norm_rotary"}
"""What an engine computes at once, whose contract is whole."""

NO_OPERATORS = {"rows_per_chunk", "whole", "run_pieces", "hold"} | COMPOSED


def test_every_operator_is_of_one_kind():
    named = [name for names in OPERATORS.values() for name in names]
    declared = {
        n for n in dir(Operators) if not n.startswith("_") and callable(getattr(Operators, n))
    }
    assert len(named) == len(set(named))
    assert set(named) == declared - NO_OPERATORS
    assert {"model", *OPERATORS} == set(KINDS)


@pytest.mark.parametrize("kinds", [(), ("attention",), ("linear", "norm"), tuple(OPERATORS)])
def test_aligned_kinds_are_answered_by_the_backend_and_the_others_by_pytorch(kinds):
    aligned, stock = CpuOperators(1), StockOperators(1)
    operators = partly_aligned(aligned, stock, kinds)
    for kind, names in OPERATORS.items():
        side = aligned if kind in kinds else stock
        assert all(getattr(operators, name).__self__ is side for name in names)
    assert aligned_side(operators) is aligned is aligned_side(aligned)
    assert operators.rows_per_chunk(137) == aligned.rows_per_chunk(137)


def test_a_whole_contract_has_operators_of_one_side_and_a_partial_one_of_both():
    assert type(make_operators(CONTRACT)) is CpuOperators
    assert type(make_operators(dataclasses.replace(CONTRACT, backend="stock"))) is StockOperators
    partial = make_operators(dataclasses.replace(CONTRACT, kinds=("model", "norm")), 2)
    assert isinstance(partial.rms_norm.__self__, CpuOperators)
    assert isinstance(partial.linear.__self__, StockOperators)
    # Norms of the CPU's operators have a row's bits on one thread of torch's alone.
    assert torch.get_num_threads() == 1
