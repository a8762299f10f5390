"""torch.distributed broadcast: the trainer's rank 0 and all engines form a group for one push.

For engines on other hosts and for GPUs (NCCL). A group per push, since an engine that was started
again could not join an old one.

A group that lost a member is no use: gloo does not tell every survivor, and cannot be cancelled. So
what waits for the group here does so in a thread of its own, which is left behind when an engine's
answer fails. It ends by the group's deadline; then the group's connections are closed, which frees the
engines that still wait for it.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from onpolicy.system.network import GLOO_INTERFACE, LOOPBACK_INTERFACE, is_loopback
from onpolicy.system.rendezvous import open_store
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport, on_all, size_of


class DistributedTransport(Transport):
    """SGLang's init_weights_update_group and update_weights_from_distributed."""

    def __init__(self) -> None:
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self._waiting: Future[Any] = Future()
        self._name = ""

    def open(self, engines: Sequence[Engine]) -> None:
        from sglang.srt.utils import init_custom_process_group

        # An engine may still know the group of a push, or of a run, that failed.
        name = self._name = f"onpolicy_weights_{uuid.uuid4().hex}"
        address = _own_address(engines)
        # Half of an engine's patience: what survives a dead member is free again before it is judged.
        timeout = timedelta(seconds=engines[0].patience(0) / 2)
        self._store, port = open_store(address, timeout)
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
                    "group_name": name,
                    "backend": backend,
                },
            )

        def join() -> Any:
            client = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)
            return init_custom_process_group(
                backend=backend,
                store=dist.PrefixStore(name, client),
                timeout=timeout,
                world_size=world_size,
                rank=0,
                group_name=name,
            )

        _choose_interface(address)
        self._group = self._while_calling(engines, join_engine, join)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: str) -> None:
        group = self._group
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._name,
            "flush_cache": False,
            "weight_version": version,
        }

        def receive(engine: Engine) -> None:
            engine.post("/update_weights_from_distributed", body, size_of(bucket))

        def broadcast() -> None:
            for _, tensor in bucket:
                dist.broadcast(tensor, src=0, group=group)

        self._while_calling(engines, receive, broadcast)

    def close(self, engines: Sequence[Engine], version: str) -> None:
        body = {"group_name": self._name}
        on_all(engines, lambda engine: engine.post("/destroy_weights_update_group", body))
        dist.destroy_process_group(self._group)
        self._group = self._store = None

    def abandon(self) -> None:
        group = self._group
        self._group = self._store = None  # without the store, nobody goes on looking for the others
        self._waiting.add_done_callback(lambda done: _destroy(group or _result(done)))

    def _while_calling(
        self, engines: Sequence[Engine], call: Callable[[Engine], Any], here: Callable[[], Any]
    ) -> Any:
        """Run `here` while all engines run `call`, each waiting for the other; what `here` returns.

        Raises the first error of any of them and does not wait for the rest.
        """
        calls = [_in_thread(partial(call, engine)) for engine in engines]
        self._waiting = _in_thread(here)
        for future in wait([self._waiting, *calls], return_when=FIRST_EXCEPTION).done:
            future.result()
        return self._waiting.result()


def _result(done: Future[Any]) -> Any:
    return None if done.exception() else done.result()


def _destroy(group: Any) -> None:
    if group is not None:
        dist.destroy_process_group(group)


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run it in a thread that the end of the program does not wait for."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _own_address(engines: Sequence[Engine]) -> str:
    """The address under which the first engine's host reaches this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(engines[0].url).hostname, 9))
        address: str = probe.getsockname()[0]
        return address


def _choose_interface(address: str) -> None:
    """Let gloo listen where the engines look for us, whatever the trainer's own group listens on."""
    if is_loopback(address):
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK_INTERFACE)
    elif os.environ.get(GLOO_INTERFACE) == LOOPBACK_INTERFACE:
        del os.environ[GLOO_INTERFACE]
