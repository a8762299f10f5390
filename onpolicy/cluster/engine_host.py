"""Servers on other hosts of the cluster: an actor on each host starts and stops them.

The actor's process holds the pipes that its servers live by (system/guard.py), and Ray ends it with the
run, so servers end however the run ends. On the controller's own host the controller holds the pipes.

`Places` says where each engine of a command runs, and where it moves after a host has left the cluster.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from onpolicy.cluster import ray_environment
from onpolicy.cluster.placement import Host, Placement, Slot, place_again
from onpolicy.cluster.ray_session import alive_hosts, answer_of
from onpolicy.errors import ConfigError, EngineError, HostLostError, in_one_line
from onpolicy.rollout.engine_args import EngineSpec
from onpolicy.rollout.server import EngineServer

logger = logging.getLogger(__name__)

T = TypeVar("T")

Elsewhere = Callable[[EngineSpec, EngineError], EngineSpec]
"""A function (a server, the reason why its host counts as gone) -> the same server on another host."""

RequireRoom = Callable[[Placement, Placement], None]
"""A check: raises ConfigError if the second placement adds engines to a host without room."""

CALL_SECONDS = 30.0
"""The most seconds for a call of a host's actor; the longest call stops a server, some 10 seconds."""

_PAUSE_SECONDS = 0.5

START_SECONDS = 120.0
"""The most seconds that a host may take to start its actor."""


class EngineHost:
    """An actor with the servers of a run on one host, by number. Errors keep their class."""

    def __init__(self, directory: str):
        """Enter the controller's working directory, `directory`."""
        ray_environment.work_in(directory)
        self._servers: list[EngineServer] = []

    def add(self, spec: EngineSpec, port: int, log_file: Path) -> tuple[int, int]:
        """Make a server without starting it; return its number on this host and its port."""
        server = EngineServer(spec, port, log_file)
        self._servers.append(server)
        return len(self._servers) - 1, server.port

    def ask(self, number: int, name: str, *args: Any) -> Any:
        """Return a property of a server, or the result of one of its methods."""
        found = getattr(self._servers[number], name)
        return found(*args) if callable(found) else found


class PlacedServer(EngineServer):
    """A server on another host, seen from the controller. If the host's actor is gone, its servers count
    as not running, and a restart begins with another actor there. If the host is gone, the server starts
    on the host that `elsewhere` chooses, which raises HostLostError if there is none."""

    def __init__(self, spec: EngineSpec, port: int, log_file: Path, elsewhere: Elsewhere):
        self.spec, self.log_file = spec, log_file.absolute()
        self._asked_port, self._elsewhere = port, elsewhere
        self._seconds_in_vain = 0.0
        self._add(port)

    def _add(self, port: int) -> None:
        """Get a number and a port from the host's actor."""
        self._host = _actor(self.spec.node)
        call = self._host.add.remote(self.spec, port, self.log_file)
        self._number, self.port = self._answer(call, START_SECONDS)

    def start(self) -> None:
        try:
            self._call("start")
        except EngineError:  # the actor died with its servers, and a new one is needed
            logger.warning("starting an actor for servers on %s again", self.spec.host)
            self._start_anew()

    def _start_anew(self) -> None:
        try:
            self._add_again()
            self._call("start")
        except EngineError as error:
            self._start_elsewhere(error)

    def _start_elsewhere(self, error: EngineError) -> None:
        lost, self.spec = self.spec.host, self._elsewhere(self.spec, error)
        logger.warning(
            "%s has left the cluster (known after %.1f s); its server starts on %s",
            lost, self._seconds_in_vain, self.spec.host,
        )  # fmt: skip
        self.port, self._seconds_in_vain = self._asked_port, 0.0
        self._start_anew()

    def _add_again(self) -> None:
        """Add the server again at its old port, which may be in use until the guard has acted."""
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            try:
                self._add(self.port)
                return
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    @property
    def is_running(self) -> bool:
        return self._asked(lambda: bool(self._call("is_running")), False)

    @property
    def exit_code(self) -> int | None:
        code: int | None = self._asked(lambda: self._call("exit_code"), None)
        return code

    def stop(self) -> None:
        self._asked(lambda: self._call("stop"), None)

    def cause_of_death(self) -> str:
        return self._asked(
            lambda: str(self._call("cause_of_death")),
            f"its host, {self.spec.host}, cannot be asked.",
        )

    def log_tail(self, lines: int = 12) -> str:
        return self._asked(
            lambda: str(self._call("log_tail", lines)),
            f"    its host, {self.spec.host}, cannot be asked",
        )

    def _call(self, method: str, *args: Any) -> Any:
        return self._answer(self._host.ask.remote(self._number, method, *args), CALL_SECONDS)

    def _answer(self, call: Any, seconds: float) -> Any:
        """Return `_result`, and add up the seconds spent on calls without an answer."""
        asked = time.monotonic()
        try:
            return _result(call, seconds)
        except EngineError:
            self._seconds_in_vain += time.monotonic() - asked
            raise

    def _asked(self, ask: Callable[[], T], otherwise: T) -> T:
        """Return the host's answer, or `otherwise` if it does not answer."""
        try:
            return ask()
        except EngineError as error:
            logger.debug("%s", error)
            return otherwise


def make_server(
    spec: EngineSpec, port: int, log_file: Path, *, elsewhere: Elsewhere
) -> EngineServer:
    """Return a server on the host in its spec, not started yet."""
    if spec.node:
        return PlacedServer(spec, port, log_file, elsewhere)
    return EngineServer(spec, port, log_file)


def _actor(node: str) -> Any:
    """Return the actor on a host; start it if there is none."""
    import ray

    # Names are known in the job's own namespace (`session`).
    named = {"name": f"engines_{node}", "get_if_exists": True}
    own = ray_environment.of_actors()
    actor = ray_environment.on_host(ray.remote(EngineHost), node, runtime_env=own, **named)
    return actor.remote(os.getcwd())


def _result(call: Any, seconds: float) -> Any:
    """Return an actor's result, or raise its error. Raises EngineError without an answer."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return answer_of(call, seconds)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from error
    except RayError as error:
        raise EngineError(
            "a host of the cluster, or the actor that starts servers there, is gone "
            f"({in_one_line(error)})."
        ) from error


@dataclass(eq=False)
class Places:
    """The slots of engines; after the loss of a host its engines get others on the remaining hosts."""

    placement: Placement
    cpu_threads: int = 0
    """Those of each process; 0: its slot's share of the cores."""

    colocate: bool = False
    hosts: Callable[[], Sequence[Host]] = alive_hosts
    require_room: RequireRoom | None = None
    _lost: set[str] = field(default_factory=set)

    def specs(self, spec: EngineSpec) -> list[EngineSpec]:
        """Return each engine's spec, by number. If everything is on this host, an engine listens
        for it alone, else at an address for the other hosts."""
        here = self.placement.is_here
        return [
            replace(
                self._in(slot, spec),
                number=number,
                node="" if slot.host.is_here else slot.host.name,
                host=spec.host if here else slot.host.address,
            )
            for number, slot in enumerate(self.placement.engines)
        ]

    def elsewhere(self, spec: EngineSpec, error: EngineError) -> EngineSpec:
        """Return the spec of an engine, moved from a lost host; `error` tells of the loss. Raises
        HostLostError if it fits nowhere, or if ranks of the trainer were on that host."""
        self._lost.add(spec.node)
        left = [host for host in self.hosts() if host.name not in self._lost]
        try:
            placement = place_again(self.placement, spec.tp_size, left, self.colocate)
            if self.require_room is not None:
                self.require_room(self.placement, placement)
        except ConfigError as reason:
            raise HostLostError(
                f"{spec.host}: the host has left the cluster, or takes no actor ({error}) Its engines "
                f"have no other place: {reason} Resume with --load, or let the run do so on the hosts "
                "that are left (--max-rank-restarts)."
            ) from error
        self.placement = placement
        slot = placement.engines[spec.number]
        return replace(self._in(slot, spec), node=slot.host.name, host=slot.host.address)

    def _in(self, slot: Slot, spec: EngineSpec) -> EngineSpec:
        return replace(
            spec,
            first_gpu=slot.devices[0] if slot.devices else 0,
            num_threads=self.cpu_threads or slot.cpu_threads,
        )
