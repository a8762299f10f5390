"""torch.distributed broadcast: the trainer's rank 0 and all engines form a group for one push.

For engines on other hosts and for GPUs (NCCL). A group per push, since an engine that was started
again could not join an old one.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from onpolicy.weight_sync.base import Engine, Transport, on_all
from onpolicy.weights import WeightBucket


class DistributedTransport(Transport):
    """SGLang's init_weights_update_group and update_weights_from_distributed."""

    def __init__(self) -> None:
        self._group: Any = None
        self._pushes = 0

    @property
    def _name(self) -> str:
        return f"onpolicy_weights_{self._pushes}"

    def open(self, engines: Sequence[Engine]) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._pushes += 1
        address, port = _own_address(engines), _free_port()
        ranks = [int(engine.report()["tp_size"]) for engine in engines]
        world_size = 1 + sum(ranks)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        offsets = {e.url: 1 + sum(ranks[:i]) for i, e in enumerate(engines)}

        def join_engine(engine: Engine) -> None:
            engine.post(
                "/init_weights_update_group",
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": offsets[engine.url],
                    "world_size": world_size,
                    "group_name": self._name,
                    "backend": backend,
                },
            )

        def join() -> None:
            self._group = init_custom_process_group(
                backend=backend,
                init_method=f"tcp://{address}:{port}",
                world_size=world_size,
                rank=0,
                group_name=self._name,
            )

        _while_calling(engines, join_engine, join)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": version,
        }

        def broadcast() -> None:
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=self._group)

        _while_calling(
            engines, lambda engine: engine.post("/update_weights_from_distributed", body), broadcast
        )

    def close(self, engines: Sequence[Engine], version: str) -> None:
        body = {"group_name": self._name}
        on_all(engines, lambda engine: engine.post("/destroy_weights_update_group", body))
        dist.destroy_process_group(self._group)


def _while_calling(
    engines: Sequence[Engine], call: Callable[[Engine], Any], here: Callable[[], None]
) -> None:
    """Run `here` while all engines run `call`, each waiting for the other."""
    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(call, engine) for engine in engines]
        here()
        for future in futures:
            future.result()


def _own_address(engines: Sequence[Engine]) -> str:
    """The address under which the first engine's host reaches this one."""
    host = engines[0].url.split("//")[1].split(":")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
