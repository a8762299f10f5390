"""Sums over a sharded K have the bits of one rank: in parts on one GPU, and over ranks on several."""

import json

import pytest
import torch
import torch.multiprocessing as mp

from onpolicy.ops.row_parallel import RowParallel
from tests.gpu import tensor_parallel
from tests.gpu.gemm_checks import make_weight
from tests.gpu.tally import Tally


def test_any_number_of_ranks_adds_up_to_the_bits_of_one(operators, model, setting, numbers, tally):
    for name in ("o", "down"):
        n, k = model.linears().get(name, (0, 0))
        if not k:
            continue
        weight, bias = make_weight(numbers, n, k), numbers(n, seed=3)
        alone = RowParallel(tensor_parallel.BLOCKS)
        with torch.no_grad():
            for m in setting.few_row_counts:
                x = numbers(m, k, seed=1)
                whole = operators.row_parallel_linear(x, weight, bias, alone)
                for ranks in (1, 2, 4, 8):
                    got = tensor_parallel.sum_of_ranks(operators, x, weight, bias, ranks)
                    tally.equal(got, whole, f"{name} {n}x{k}, {m} rows, {ranks} ranks")


def test_row_parallel_linears_are_row_invariant_for_any_number_of_blocks(
    operators, model, setting, numbers, tally
):
    n, k = model.linears()["o"]
    weight, x = make_weight(numbers, n, k), numbers(setting.three_row_counts[-1], k, seed=1)
    with torch.no_grad():
        for blocks in (1, 2, 4, 8):
            parallel = RowParallel(blocks)
            whole = operators.row_parallel_linear(x, weight, None, parallel)
            for m in setting.three_row_counts:
                got = operators.row_parallel_linear(x[:m], weight, None, parallel)
                tally.equal(got, whole[:m], f"{blocks} blocks, {m} rows")


def test_experts_are_row_invariant_for_any_number_of_blocks(operators, setting, tally):
    with torch.no_grad():
        for blocks in (1, 2, 4, 8):
            tensor_parallel.check_expert_rows(
                operators, setting.few_row_counts, blocks, setting.device, tally
            )


def test_ranks_give_the_bits_of_one(backend, operators, setting, tally, tmp_path):
    """Check with NCCL on as many GPUs as there are, up to 8; with gloo in a rehearsal."""
    available = torch.cuda.device_count() if setting.device == "cuda" else 2
    ranks = max((p for p in (2, 4, 8) if p <= available), default=0)
    if not ranks:
        pytest.skip(f"needs 2 GPUs, {available} here")
    mp.spawn(
        tensor_parallel.compare_with_one_rank, (ranks, backend, setting, tmp_path), nprocs=ranks
    )
    for rank in range(ranks):
        counts = Tally(**json.loads((tmp_path / f"{rank}.json").read_text()))
        counts.require_none()
        tally.cases += counts.cases
        tally.values += counts.values
