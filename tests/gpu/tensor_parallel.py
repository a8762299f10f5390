"""Row-parallel linears and experts over ranks; outside of the test files, for spawned processes."""

import dataclasses
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F

from onpolicy.ops.mixture_of_experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from tests.gpu.backends import make_backend
from tests.gpu.row_checks import Numbers, check_rows
from tests.gpu.tally import Tally

BLOCKS = 8
EXPERTS, CHOSEN, HIDDEN, INTERMEDIATE = 16, 4, 256, 256
"""The sizes of the compared experts."""


def sum_of_ranks(operators, x, weight, bias, ranks):
    """Return a row-parallel linear as `ranks` ranks compute it, each with shards in memory of its
    own."""
    parts = []
    for shards in zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True):
        blocks = (shard.contiguous().chunk(BLOCKS // ranks, -1) for shard in shards)
        parts.append(
            tree_sum([operators.partial_linear(*pair) for pair in zip(*blocks, strict=True)])
        )
    return (tree_sum(parts) + bias.float()).to(x.dtype)


class _Experts:
    """A layer of random experts and its router's choices, or one rank's shard of its experts."""

    def __init__(self, numbers, rows):
        self.x = numbers(rows, HIDDEN, seed=1)
        scores = torch.softmax(numbers(rows, EXPERTS, seed=2).float(), -1)
        self.weights, self.experts = scores.topk(CHOSEN, dim=-1)
        self.gate = numbers(EXPERTS, INTERMEDIATE, HIDDEN, seed=3, scale=HIDDEN**-0.5)
        self.up = numbers(EXPERTS, INTERMEDIATE, HIDDEN, seed=4, scale=HIDDEN**-0.5)
        self.down = numbers(EXPERTS, HIDDEN, INTERMEDIATE, seed=5, scale=INTERMEDIATE**-0.5)

    def mix(self, operators, rows, parallel, rank=0):
        """Return the layer's output for some of its rows, int64 [M], with this rank's shard of the
        experts."""
        gate, up = (w.chunk(parallel.ranks, dim=1)[rank] for w in (self.gate, self.up))
        return mix_experts(
            operators,
            self.x[rows],
            self.experts[rows],
            self.weights[rows],
            torch.cat([gate, up], dim=1),
            self.down.chunk(parallel.ranks, dim=2)[rank].contiguous(),
            gated_halves(operators, F.silu),
            parallel,
        )


def check_expert_rows(operators, row_counts, blocks, device, tally):
    """Check that a token's mixture of experts does not depend on the other tokens."""
    experts = _Experts(Numbers(torch.bfloat16, device), row_counts[-1])
    rows = torch.arange(row_counts[-1], device=device)
    parallel = RowParallel(blocks)
    check_rows(
        lambda rows: experts.mix(operators, rows, parallel),
        rows,
        row_counts,
        tally,
        f"experts, {blocks} blocks",
    )


def compare_with_one_rank(rank, ranks, backend, setting, directory):
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if setting.device == "cuda" else "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=ranks,
    )
    tally = Tally()
    with torch.no_grad():
        _compare(make_backend(backend, setting), rank, ranks, setting, tally)
    (directory / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(tally)))
    dist.destroy_process_group()


def _compare(operators, rank, ranks, setting, tally):
    numbers = Numbers(torch.bfloat16, setting.device)
    alone, together = RowParallel(BLOCKS), RowParallel(BLOCKS, dist.group.WORLD)
    for m in setting.few_row_counts:
        x, weight, bias = numbers(m, 512, seed=1), numbers(96, 512, seed=2), numbers(96, seed=3)
        here = (t.chunk(ranks, dim=-1)[rank].contiguous() for t in (x, weight))
        tally.equal(
            operators.row_parallel_linear(*here, bias, together),
            operators.row_parallel_linear(x, weight, bias, alone),
            f"linear, {m} rows, {ranks} ranks",
        )
        experts, rows = _Experts(numbers, m), torch.arange(m, device=setting.device)
        tally.equal(
            experts.mix(operators, rows, together, rank),
            experts.mix(operators, rows, alone),
            f"experts, {m} rows, {ranks} ranks",
        )
