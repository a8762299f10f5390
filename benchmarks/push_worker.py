"""Starts a server and pushes a checkpoint's weights to it, once for each line that it reads.

For `benchmarks.push`. It runs on the onpolicy that PYTHONPATH names, in its directory, so that another
commit's pushes can be measured too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from onpolicy.compat.process import prepare_process
from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.client import EngineClient
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import make_rollout_group
from onpolicy.run.launch.host_shares import share_of_cores
from onpolicy.system.memory import num_gpus
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import push_weights
from onpolicy.weights.transports import make_transport


def load(checkpoint: Path, device: str) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint."""
    tensors = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=device) as opened:
            tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
    return tensors


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[WeightBucket]:
    """The tensors, `max_bytes` at a time."""
    bucket: WeightBucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


@contextmanager
def server(checkpoint: str, directory: Path) -> Iterator[EngineClient]:
    """One with aligned operators; it shares the only GPU with this process, where there is one."""
    hf_config = load_config(checkpoint)
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=checkpoint),
        engine=groups.EngineConfig(rollout_max_concurrency=1, colocate=num_gpus() == 1),
        parity=groups.ParityConfig(true_on_policy_mode=True),
        sglang_args=("--max-total-tokens", "1024"),
    )
    contract = contract_for(config, hf_config, aligned=True)
    group = make_rollout_group(config, hf_config, contract, directory, longest_sequence=64)
    try:
        group.launch()
        group.connect({})
        yield group.clients[0]
    finally:
        group.stop()


def main() -> None:
    """Settings come in the first line, then for each push its way, version and MiB of a bucket."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    settings = json.loads(sys.stdin.readline())
    prepare_process()
    torch.set_num_threads(share_of_cores(1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = load(Path(settings["checkpoint"]), device)
    transports: dict[str, Any] = {}
    directory = Path(settings["directory"])
    with server(settings["checkpoint"], directory) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            way = asked["way"]
            if way not in transports:
                options = {"on_gpus": device == "cuda"} if way == "auto" else {}
                transports[way] = make_transport(way, directory, **options)
            started, used = time.perf_counter(), time.process_time()
            # A trainer gathers its weights anew for every push.
            copies = ((name, tensor.clone()) for name, tensor in tensors)
            sent = buckets(copies, asked["bucket_mib"] << 20)
            digest = push_weights(sent, [client], transports[way], asked["version"])
            answer = {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - used,
                "digest": digest,
                "tensors": len(tensors),
                "bytes": sum(tensor.nbytes for _, tensor in tensors),
            }
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
