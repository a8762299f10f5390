"""Which products linears are made of, on whatever CPU the tests run."""

import pytest
import torch
import torch.nn.functional as F

from onpolicy.ops.cpu.gemms import AMX_ROWS, MAX_ROWS, Gemms
from onpolicy.ops.cpu.linear import tiled_linear
from onpolicy.ops.cpu.threads import PiecePool
from onpolicy.ops.machine import multiplies_with_amx


def rows_of_products(dtype, has_amx, rows, threads):
    """How many rows each product had."""
    found = []

    def product(x, weight, bias):
        found.append(len(x))
        return F.linear(x, weight, bias)

    gemms = Gemms(PiecePool(threads), torch.bfloat16, product, has_amx=has_amx)
    tiled_linear(gemms, torch.ones(rows, 32, dtype=dtype), torch.ones(300, 32, dtype=dtype), None)
    return set(found)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 64, 65, 700, 2500])
def test_all_products_that_amx_multiplies_have_equally_many_rows(rows, threads):
    """Its sums depend on their number; those of other instructions do not, and take what there is."""
    assert rows_of_products(torch.bfloat16, True, rows, threads) == {AMX_ROWS}
    assert max(rows_of_products(torch.float32, True, rows, threads)) <= MAX_ROWS
    if rows != 64:
        assert rows_of_products(torch.bfloat16, False, rows, threads) != {AMX_ROWS}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("", True), ("AVX512_CORE_AMX", True), ("AVX512_CORE_BF16", False), ("avx2", False)],
)
def test_amx_may_be_hidden_from_onednn(monkeypatch, limit, expected):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert multiplies_with_amx({"DNNL_MAX_CPU_ISA": limit}) == expected
