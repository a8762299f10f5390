"""Worker of `benchmarks.push`: starts servers and pushes weights to them, once per line that it
reads.

It runs on the onpolicy that PYTHONPATH names, in its directory, so that another commit's pushes can
be measured too. Each further rank of the trainer is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from onpolicy.cluster.placement import share_of_cores
from onpolicy.compat.process import prepare_process
from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.system.free_memory import num_gpus
from onpolicy.system.network import LOOPBACK
from onpolicy.training import distributed
from onpolicy.training.weight_outlet import WeightOutlet
from onpolicy.weights.digest import WeightBucket, in_buckets
from onpolicy.weights.push import Engine


def load(checkpoint: Path, device: str) -> list[tuple[str, torch.Tensor]]:
    """Return all tensors of a checkpoint."""
    tensors = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=device) as opened:
            tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    return tensors


class Source:
    """Weights that every rank gathers anew for every push, as under FSDP2."""

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]):
        self._tensors = tensors

    def weight_buckets(
        self,
        max_bytes: int,
        part: str = "all",
        ranks: Collection[int] = (0,),
        masters: bool = False,
    ) -> Iterator[WeightBucket]:
        for bucket in in_buckets(((name, x.clone()) for name, x in self._tensors), max_bytes):
            if distributed.rank() in ranks:
                yield bucket

    def frozen_digest(self) -> str:
        return ""


class Rank:
    """One rank of a pushing trainer, which keeps its outlets from push to push."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tensors = load(Path(settings["checkpoint"]), device)
        self._outlets: dict[tuple[str, int, bool], WeightOutlet] = {}

    def push(self, asked: dict[str, Any], engines: Sequence[Engine]) -> str:
        """Push to the engines and return the digest of their weights. Collective."""
        key = asked["way"], asked["bucket_mib"], asked["by_rank_0"]
        config, contract = configured(self._settings, key[0], key[1])
        if key not in self._outlets:
            self._outlets[key] = WeightOutlet(config, contract, Source(self.tensors))
            if asked["by_rank_0"]:
                self._outlets[key].transport.one_copy = True
        return self._outlets[key].push(engines, asked["version"])


def configured(settings: dict[str, Any], way: str = "auto", mib: int = 512) -> tuple[Any, Any]:
    """Return the configuration of a run with aligned operators, and its contract; its server shares
    the only GPU with the trainer, where there is one."""
    checkpoint = settings["checkpoint"]
    sync: dict[str, Any] = {"weight_sync": way, "update_weight_buffer_size": mib}
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=checkpoint),
        engine=groups.EngineConfig(
            rollout_max_concurrency=1,
            rollout_num_engines=settings["engines"],
            colocate=num_gpus() == 1,
        ),
        parity=groups.ParityConfig(true_on_policy_mode=True),
        sync=groups.WeightSyncConfig(**sync),
        output=groups.OutputConfig(run_dir=settings["directory"]),
        sglang_args=("--max-total-tokens", "1024"),
    )
    return config, contract_for(config, load_config(checkpoint), aligned=True)


@contextmanager
def servers(settings: dict[str, Any]) -> Iterator[Sequence[Engine]]:
    """Yield as many servers as the settings say."""
    config, contract = configured(settings)
    hf_config, directory = load_config(settings["checkpoint"]), Path(settings["directory"])
    group = make_rollout_group(config, hf_config, contract, directory, longest_sequence=64)
    try:
        group.launch()
        group.connect({})
        yield group.clients
    finally:
        group.stop()


def shared(asked: Any) -> Any:
    """Broadcast rank 0's request to all ranks, and return it; None: the end."""
    given = [asked]
    torch.distributed.broadcast_object_list(given, src=0)
    return given[0]


def follow(rank: int, port: int, settings: dict[str, Any]) -> None:
    """Push with rank 0 until it ends."""
    distributed.join(LOOPBACK[0], port, rank=rank, world_size=settings["ranks"])
    this = Rank(settings)
    while (asked := shared(None)) is not None:
        this.push(*asked)


def lead(settings: dict[str, Any]) -> None:
    """Start the other ranks and the servers; push once per line, with its way, version, MiB of a
    bucket and whether rank 0 alone sends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    store, port = distributed.open_store(LOOPBACK[0])
    others = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(port), json.dumps(settings)])
        for rank in range(1, settings["ranks"])
    ]
    distributed.join(LOOPBACK[0], port, rank=0, world_size=settings["ranks"])
    this = Rank(settings)
    with servers(settings) as engines:
        for line in sys.stdin:
            asked = json.loads(line)
            shared((asked, engines))
            started, used = time.perf_counter(), time.process_time()
            digest = this.push(asked, engines)
            answer = {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - used,
                "digest": digest,
                "tensors": len(this.tensors),
                "bytes": sum(tensor.nbytes for _, tensor in this.tensors),
            }
            print(json.dumps(answer), file=answers)
        shared(None)
    for other in others:
        other.wait()
    del store


def main() -> None:
    """Read the settings in the first line (rank 0), or follow."""
    prepare_process()
    torch.set_num_threads(share_of_cores(1))
    if len(sys.argv) > 1:
        rank, port, settings = sys.argv[1:]
        follow(int(rank), int(port), json.loads(settings))
    else:
        lead(json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    main()
