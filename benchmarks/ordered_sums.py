"""Price of adding the ranks' gradients in one order, against FSDP2's own reduce-scatter, in turns.

    python -m benchmarks.ordered_sums --hf-checkpoint runs/quickstart/inputs/model [--json FILE]

Each rank is a process: with NCCL on a GPU of its own, without GPUs with gloo on its share of the cores.
`sums` are of one module's gradients of so many million float32 elements; in `replicas` each rank has
one of its own (--fsdp-shard-ranks 1), and FSDP2 would all-reduce. `step` is a whole optimizer step on
aligned operators. The slowest rank's time counts; `ratio` is the time in one order over the other.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from onpolicy.bench.setting import setting
from onpolicy.bench.step import step_measure
from onpolicy.bench.turns import take_turns
from onpolicy.cli.command import put_out
from onpolicy.cluster.placement import share_of_cores
from onpolicy.config.groups import CheckpointConfig, ParityConfig
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.models.hf_config import load_config
from onpolicy.outputs.directory import versions
from onpolicy.system.network import LOOPBACK
from onpolicy.training import distributed, make_trainer
from onpolicy.training.advantages import RewardEstimator
from onpolicy.training.fsdp.fsdp_optimizer import OrderedReduceScatter, Turn
from onpolicy.training.fsdp.replicas import Replicas

Work = Callable[[], object]


def compared(ordered: Work, own: Work, repetitions: int) -> dict[str, Any]:
    """Return the median seconds of the slowest rank for both, and the median ratio of neighbours."""
    measures = {"ordered": lambda: _seconds(ordered), "own": lambda: _seconds(own)}
    runs = take_turns(measures, 1, repetitions)
    ratios = [a / b for a, b in zip(runs["ordered"], runs["own"], strict=True)]
    return {**{name: median(found) for name, found in runs.items()}, "ratio": median(ratios)}


def _seconds(work: Work) -> float:
    dist.barrier()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return max(distributed.gather(time.perf_counter() - started, None))


def sums(millions: float, repetitions: int, device: str) -> dict[str, Any]:
    """Compare sums of one module's gradients that all ranks shard."""
    ranks = distributed.world_size()
    size = int(millions * 1e6) // ranks
    parts, total = torch.ones(ranks * size, device=device), torch.empty(size, device=device)
    ordered, own, group = OrderedReduceScatter(Turn()), DefaultReduceScatter(), dist.group.WORLD
    assert group is not None

    def in_order() -> None:
        ordered.turn.sums.clear()
        ordered(total, parts, group, None)

    return compared(in_order, lambda: own(total, parts, group, dist.ReduceOp.SUM), repetitions)


def replicas(millions: float, repetitions: int, device: str) -> dict[str, Any]:
    """Compare sums of one module's gradients over replicas of one rank."""
    turn = Turn(Replicas(1, device))
    ordered, total = OrderedReduceScatter(turn), torch.ones(int(millions * 1e6), device=device)

    def in_order() -> None:
        turn.sums.clear()
        ordered.reduce_unsharded(total)
        turn.finish_sums()

    return compared(in_order, lambda: dist.all_reduce(total), repetitions)


def step(config: BenchConfig, threads: int) -> dict[str, Any]:
    """Compare steps whose operators are aligned both times."""
    made, contract = setting(config, load_config(config.model.hf_checkpoint), "aligned")
    in_order, own = (
        step_measure(
            make_trainer(
                replace(made, parity=ParityConfig(true_on_policy_mode=mode, parity_policy="warn")),
                contract, threads, RewardEstimator("reinforce"),
            ),
            config.num_tokens[0], config, torch_threads=1,
        )
        for mode in (True, False)
    )  # fmt: skip
    return {"tokens": config.num_tokens[0], **compared(in_order, own, config.repetitions)}


def _rank(rank: int, port: int, args: argparse.Namespace, answer: Connection) -> None:
    """Measure on one rank; rank 0 sends the results."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    threads = share_of_cores(args.ranks)
    torch.set_num_threads(threads)
    distributed.join(LOOPBACK[0], port, rank=rank, world_size=args.ranks)
    found: dict[str, Any] = {
        "ranks": args.ranks, "backend": "nccl" if device == "cuda" else "gloo",
        "threads": threads, "repetitions": args.repetitions,
    }  # fmt: skip
    for function in (sums, replicas):
        found[function.__name__] = {
            str(millions): function(millions, args.repetitions, device)
            for millions in args.millions
        }
    if args.hf_checkpoint:
        model = CheckpointConfig(hf_checkpoint=args.hf_checkpoint, dtype=args.dtype)
        repetitions, tokens = args.repetitions, (args.num_tokens,)
        bench = BenchConfig(
            what="step", model=model, repetitions=repetitions, num_tokens=tokens, prompt_len=30
        )
        found["step"] = step(bench, threads)
    if rank == 0:
        answer.send(found)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf-checkpoint", default="", help="model of the step; without, no step")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=float, nargs="+", default=[1.0, 16.0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    _store, port = distributed.open_store(LOOPBACK[0])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank, args=(rank, port, args, theirs), daemon=True)
        for rank in range(args.ranks)
    ]
    for each in ranks:
        each.start()
    theirs.close()
    found = ours.recv()
    for each in ranks:
        each.join()
    put_out({"what": "ordered sums", **found, "versions": dict(versions())}, args.json)


if __name__ == "__main__":
    main()
