"""Transport by torch.distributed broadcast, in a group of a trainer's rank and its engines.

It serves engines on other hosts and GPUs (NCCL); `ByHostTransport` joins it with a transport by
memory for this host's engines, in one push. The group is kept from push to push, as long as its
engines are the same processes. An engine that restarted cannot join the old group, so a new one is
formed then. The rest of an old group stays open in the other engines: NCCL may wait for ever when
not all of a group leave it.

A group that lost a member is useless: gloo does not tell every survivor, and cannot be cancelled.
So the trainer waits for the group in a separate thread, which is left behind when an engine's
answer fails. It ends by the group's deadline; then the group's connections are closed, which frees
the engines that still wait for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from onpolicy.errors import EngineError
from onpolicy.system.background import in_background
from onpolicy.system.network import GLOO_INTERFACE, LOOPBACK_INTERFACE, is_loopback
from onpolicy.system.rendezvous import open_store
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.push import Engine, Transport, size_of
from onpolicy.weights.transports import shared_memory


class DistributedTransport(Transport):
    """SGLang's init_weights_update_group and update_weights_from_distributed."""

    def __init__(self) -> None:
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self._waiting: Future[Any] = Future()
        self._name = ""
        self._members: list[tuple[str, str]] = []
        self._engines: Sequence[Engine] = ()
        self._buffer = shared_memory.Buffer(
            lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)
        )

    def open(self, engines: Sequence[Engine]) -> None:
        reports = [engine.report() for engine in engines]
        members = [
            (engine.url, report["instance"])
            for engine, report in zip(engines, reports, strict=True)
        ]
        if self._group is not None and members == self._members:
            return
        self.abandon()
        self._group = self._form(engines, [int(report["tp_size"]) for report in reports])
        self._members, self._engines = members, engines

    def _form(self, engines: Sequence[Engine], ranks: Sequence[int]) -> Any:
        """Form a new group; ranks: the number of ranks of each engine."""
        from sglang.srt.utils import init_custom_process_group

        # An engine may still know the group of a push, or of a run, that failed.
        name = self._name = f"onpolicy_weights_{uuid.uuid4().hex}"
        address = _own_address(engines)
        # Half of an engine's timeout: survivors of a dead member are free before they are judged dead.
        timeout = timedelta(seconds=engines[0].patience(0) / 2)
        self._store, port = open_store(address, timeout)
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
        return self._while_calling(engines, join_engine, join)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        group, bucket = self._group, shared_memory.in_order(bucket)
        body = {
            **described(bucket),
            "group_name": self._name,
            "load_format": shared_memory.LOAD_FORMAT,
            "flush_cache": False,
            "weight_version": str(version),
        }

        def receive(engine: Engine) -> None:
            engine.post("/update_weights_from_distributed", body, size_of(bucket))

        on_host = bucket[0][1].device.type == "cpu"
        data = self._buffer.fill(bucket) if on_host else shared_memory.flatten(bucket)
        self._while_calling(engines, receive, lambda: dist.broadcast(data, src=0, group=group))

    def abandon(self) -> None:
        group = self._group
        self._group = self._store = None  # without the store, no rank waits for the others
        self._waiting.add_done_callback(lambda done: _destroy(group or _result(done)))
        self._buffer.free()

    def end(self) -> None:
        """Leave the group, and ask the reachable engines to leave it."""
        self._buffer.free()
        if (group := self._group) is None:
            return
        body = {"group_name": self._name}

        def leave(engine: Engine) -> None:
            with contextlib.suppress(EngineError):
                engine.post("/destroy_weights_update_group", body)

        self._while_calling(self._engines, leave, lambda: dist.destroy_process_group(group))
        self._group = self._store = None

    def _while_calling(
        self, engines: Sequence[Engine], call: Callable[[Engine], Any], here: Callable[[], Any]
    ) -> Any:
        """Return the result of `here`, run while all engines run `call`; each waits for the other.
        Raise the first error of any of them without waiting for the rest."""
        calls = [in_background(partial(call, engine)) for engine in engines]
        self._waiting = in_background(here)
        for future in wait([self._waiting, *calls], return_when=FIRST_EXCEPTION).done:
            future.result()
        return self._waiting.result()


def described(bucket: WeightBucket) -> dict[str, list[Any]]:
    """Return the metadata with which an engine allocates an ordered bucket."""
    return {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def _result(done: Future[Any]) -> Any:
    return None if done.exception() else done.result()


def _destroy(group: Any) -> None:
    if group is not None:
        dist.destroy_process_group(group)


def _own_address(engines: Sequence[Engine]) -> str:
    """Return the address at which the first engine's host reaches this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((urlsplit(engines[0].url).hostname, 9))
        address: str = probe.getsockname()[0]
        return address


def _choose_interface(address: str) -> None:
    """Make gloo listen where the engines look for us, whatever the trainer's own group listens on."""
    if is_loopback(address):
        os.environ.setdefault(GLOO_INTERFACE, LOOPBACK_INTERFACE)
    elif os.environ.get(GLOO_INTERFACE) == LOOPBACK_INTERFACE:
        del os.environ[GLOO_INTERFACE]


class ByHostTransport(Transport):
    """The transport `near` for engines on the trainer's host; the others form one group."""

    def __init__(self, near: Transport):
        self._near, self._far = near, DistributedTransport()
        self.one_copy = near.one_copy

    def open(self, engines: Sequence[Engine]) -> None:
        for way, theirs in self._ways(engines):
            way.open(theirs)

    def send(self, bucket: WeightBucket, engines: Sequence[Engine], version: int) -> None:
        for way, theirs in self._ways(engines):
            way.send(bucket, theirs, version)

    def close(self, engines: Sequence[Engine], version: int) -> None:
        for way, theirs in self._ways(engines):
            way.close(theirs, version)

    def abandon(self) -> None:
        self._near.abandon()
        self._far.abandon()

    def end(self) -> None:
        self._near.end()
        self._far.end()

    def _ways(self, engines: Sequence[Engine]) -> Iterator[tuple[Transport, list[Engine]]]:
        """Return the transports that have engines, each with those engines."""
        near = [engine for engine in engines if self.is_near(engine)]
        far = [engine for engine in engines if engine not in near]
        ways: tuple[tuple[Transport, list[Engine]], ...] = ((self._near, near), (self._far, far))
        return ((way, theirs) for way, theirs in ways if theirs)
