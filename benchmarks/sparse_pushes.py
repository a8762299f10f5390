"""Whole pushes and pushes of changes side by side: bytes and seconds, to real servers on this host.

    python -m benchmarks.sparse_pushes --hf-checkpoint DIR --json OUT.json [--share 0.04]
        [--ways tensor,distributed,disk] [--runs quickstart=RUN_DIR,smollm2=RUN_DIR]

Two servers get the same weights in turns, one of them only what changed. Between two rounds `--share` of
the elements, drawn at random, get another last bit. `--runs`: finished runs with --sparse-weight-sync,
whose shares by step are recorded too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.push_worker import Source, configured, load, servers
from onpolicy.compat.process import prepare_process
from onpolicy.training import distributed
from onpolicy.training.weight_outlet import WeightOutlet
from onpolicy.weights.push import size_of
from tests.support.gpu.machine import describe_machine, write_json


class Side:
    """A server and what pushes to it: changes, or all."""

    def __init__(self, settings: Any, way: str, engine: Any, source: Any, *, sparse: bool):
        config, contract = configured(settings, way)
        sync = dataclasses.replace(config.sync, sparse_weight_sync=sparse)
        self.outlet = WeightOutlet(dataclasses.replace(config, sync=sync), contract, source)
        self.engine, self.bytes, transport = engine, 0, self.outlet.transport
        self._send, transport.send = transport.send, self._counted

    def _counted(self, bucket: Any, *args: Any) -> None:
        self.bytes += size_of(bucket)
        self._send(bucket, *args)

    def push(self, version: int) -> dict[str, Any]:
        self.bytes, used, started = 0, _cpu_seconds(), time.perf_counter()
        digest = self.outlet.push([self.engine], version)
        seconds, cpu = time.perf_counter() - started, _cpu_seconds() - used
        return {"seconds": seconds, "cpu_seconds": cpu, "bytes": self.bytes, "digest": digest}


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of both servers, of which one idles."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in family))


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each way; return medians, and every push."""
    directory = str(args.json.with_suffix("").absolute())
    settings = {"checkpoint": args.hf_checkpoint, "directory": directory, "engines": 2}
    tensors = load(Path(args.hf_checkpoint), "cpu")
    source, cells, version = Source(tensors), [], 0
    with servers(settings) as engines:
        for way in args.ways.split(","):
            sides = {
                kind: Side(settings, way, engine, source, sparse=kind == "sparse")
                for kind, engine in zip(("whole", "sparse"), engines, strict=True)
            }
            rounds: dict[str, list[Any]] = {kind: [] for kind in sides}
            for _ in range(6):
                version += 1
                for _, tensor in tensors:
                    bits = tensor.view(-1).view(torch.int16)
                    bits[torch.randint(len(bits), (round(args.share * len(bits)),))] ^= 1
                order = list(sides)[:: -1 if version % 2 else 1]
                found = {kind: sides[kind].push(version) for kind in order}
                assert found["whole"].pop("digest") == found["sparse"].pop("digest")
                for kind in sides:
                    rounds[kind].append(found[kind])
            cell: dict[str, Any] = {"way": way, "share": args.share}
            for kind, side in sides.items():
                side.outlet.close()
                names, of = (
                    ("bytes", "seconds", "cpu_seconds"),
                    rounds[kind][1:],
                )  # the first is whole
                cell[kind] = {name: median(each[name] for each in of) for name in names}
                cell[kind]["pushes"] = rounds[kind]
            cells.append(cell)
    return cells


def shares(run: Path) -> dict[str, list[float]]:
    """Return what a run's metrics say of its pushes, step by step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("push/changed_share", "push/sent_share")
    return {name: [record[name] for record in records if name in record] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--ways", default="tensor,distributed,disk", help="commas between")
    parser.add_argument("--share", type=float, default=0.04)
    parser.add_argument("--runs", default="", help="NAME=RUN_DIR, commas between")
    args = parser.parse_args()
    prepare_process()
    distributed.init_process_group()
    runs = dict(each.split("=", 1) for each in args.runs.split(",") if each)
    machine = describe_machine() | {"cores": len(os.sched_getaffinity(0))}
    record = {"machine": machine, "runs": {name: shares(Path(run)) for name, run in runs.items()}}
    write_json(args.json, {**record, "pushes": measure(args)})


if __name__ == "__main__":
    main()
