"""A run's membership in a Ray cluster: one of its own on this host, or one that others have started.

A watch notices when the head of a joined cluster is gone (`watching`). Ray itself retries its GCS for a
minute, and then aborts this process from C++.
"""

import atexit
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from onpolicy.cluster import local_ray, ray_environment
from onpolicy.cluster.placement import Host
from onpolicy.config.groups import HostsConfig
from onpolicy.errors import ConfigError, EngineError, in_one_line
from onpolicy.system import ending
from onpolicy.system.background import in_background
from onpolicy.system.free_memory import Gpu, free_memory, gpus

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 1.0

_ANSWER_SECONDS = 60.0
"""The most seconds for the head to answer, and for a host to start a process that answers."""

_PLACEMENT_SECONDS = 300.0
"""The most seconds to wait for hosts that have not joined the cluster yet, or have too little memory."""

_SECONDS_AFTER_A_LOSS = 20.0
"""The most seconds that a run waits for room after a loss: resources may be released late."""

_LEAVE_SECONDS = 20.0

PATIENCE = 10.0
"""The seconds that a restarted head has to answer."""

_SECONDS_BETWEEN_LOOKS = 0.5

_KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 5),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 2),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)
"""The keepalive options: the kernel gives up a host without power, which closes nothing, after 11 s."""

_lost: EngineError | None = None
"""The error about the loss of the session's cluster, once it is lost."""


@contextmanager
def begun(cluster: HostsConfig) -> Iterator[None]:
    """Start a cluster of this command's own in the background, if it needs one, until its session."""
    if cluster.ray_address:
        yield
        return
    ray_environment.prepare(local=True)
    with local_ray.begun():
        yield


@contextmanager
def session(cluster: HostsConfig, start_seconds: float = 600.0) -> Iterator[tuple[Host, ...]]:
    """Join a cluster within the context, and yield its present hosts, this one first.

    Actors that are made meanwhile end with it. So does a cluster that was started for it, which may take
    `start_seconds` to start. If the cluster or its head is lost, the command ends. Raises ConfigError if
    there is no cluster at --ray-address, EngineError if one of its own does not start."""
    global _lost
    ray_environment.prepare(local=not cluster.ray_address)
    _lost = None
    with ExitStack() as stack:
        address = cluster.ray_address or stack.enter_context(
            local_ray.local_ray(start_seconds, _lose)
        )
        _join(address)
        stack.callback(_leave)
        if cluster.ray_address:
            stack.enter_context(watching(_head(), _lose))
        yield alive_hosts()


def _lose(error: EngineError) -> None:
    """Record the loss for later calls, and end the command wherever its main thread waits."""
    global _lost
    _lost = error
    ending.lose(error)


def _join(address: str) -> None:
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address, namespace=uuid.uuid4().hex, log_to_driver=True, logging_level=logging.WARNING
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray-address={address}: cannot be joined ({in_one_line(error)}). Start a node of the "
            "cluster on this host (`ray start`), with the same versions of Ray and Python and the same "
            "token (RAY_AUTH_TOKEN), or leave the flag out for a cluster of this host alone."
        ) from error
    # Restore the handler: Ray's writes a stack of addresses (RayLog::InstallFailureSignalHandler).
    signal.signal(signal.SIGTERM, on_sigterm)


def _head() -> str:
    """Return the address of the cluster's GCS."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _leave() -> None:
    import ray

    try:
        in_background(ray.shutdown).result(_LEAVE_SECONDS)
    except TimeoutError:  # until a cluster of our own has ended
        atexit.unregister(ray.shutdown)  # it would wait for the first call of it
        logger.warning("Ray's node on this host stands still, and is not waited for")


def alive_hosts() -> tuple[Host, ...]:
    """Return the hosts of the cluster, this one first, the others by label. Raises EngineError if
    this one has left it: without a node of its own, Ray neither starts anything for a process nor
    answers it; or if the cluster's head does not say who is there."""
    import ray

    if _lost is not None:
        raise _lost
    here = ray.get_runtime_context().get_node_id()
    try:
        nodes = in_background(ray.nodes).result(_ANSWER_SECONDS)
    except TimeoutError as error:
        raise EngineError(
            f"the head of the Ray cluster (its process gcs_server) has not answered for "
            f"{_ANSWER_SECONDS:.0f} seconds: it stands still, or its host is overloaded. Start the "
            "cluster again, then this command, a run that saves with --load."
        ) from error
    hosts = [_host(node, here) for node in nodes if node["Alive"]]
    if not any(host.is_here for host in hosts):
        raise EngineError(
            "this host's node has left the Ray cluster, and without it nothing can be started on any "
            "host. Start it again (`ray start`), then this command, a run that saves with --load."
        )
    return tuple(sorted(hosts, key=lambda h: (not h.is_here, h.label, h.address, h.name)))


def _host(node: dict[str, object], here: str) -> Host:
    resources, address = node["Resources"], str(node["NodeManagerAddress"])
    named = node["NodeName"] != address  # by `ray start --node-name`
    assert isinstance(resources, dict)
    return Host(
        name=str(node["NodeID"]),
        label=str(node["NodeName" if named else "NodeManagerHostname"]),
        address=address,
        num_cpus=int(resources.get("CPU", 0)),
        num_gpus=int(resources.get("GPU", 0)),
        is_here=node["NodeID"] == here,
    )


def free_memory_on(hosts: Sequence[Host]) -> dict[Host, int]:
    """Return the bytes that new processes may take on each host; raises as `told_by` does."""
    return told_by(hosts, free_memory, "how much memory is free there")


def gpus_on(hosts: Sequence[Host]) -> dict[Host, tuple[Gpu, ...]]:
    """Return the GPUs that new processes see on each host of the cluster; raises as `told_by` does."""
    return told_by(hosts, gpus, "which GPUs are there")


def told_by(hosts: Sequence[Host], ask: Callable[[], T], what: str) -> dict[Host, T]:
    """Return the result of `ask` on each host of the cluster, called in a process that then ends. Raises
    ConfigError, with `what`, if a host does not answer; EngineError once this host leaves it."""
    from ray.exceptions import RayError

    asked = {host: _asked(host, ask) for host in hosts if not host.is_here}
    told = {host: ask() for host in hosts if host.is_here}
    for host, call in asked.items():
        try:
            told[host] = answer_of(call, _ANSWER_SECONDS)
        except RayError as error:
            raise ConfigError(
                f"{host}: does not say {what} ({in_one_line(error)}). Start its node of the cluster "
                "again, with the same versions of Ray, Python and onpolicy."
            ) from error
    return told


def answer_of(call: Any, seconds: float) -> Any:
    """Return the result of a task or of an actor's method. Raises RayError if it failed, or takes
    longer than `seconds`; EngineError as soon as this host leaves the cluster."""
    import ray

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not ray.wait([call], timeout=_POLL_SECONDS)[0]:
        alive_hosts()  # raises: without a node here the call would never end
    return ray.get(call, timeout=0)


def _asked(host: Host, ask: Callable[[], T]) -> Any:
    import ray

    task = ray.remote(max_calls=1)(ask)  # a process that stayed alive would keep its CUDA contexts
    own = ray_environment.of_actors()
    return ray_environment.on_host(task, host.name, runtime_env=own).remote()


def when_it_fits(
    place: Callable[[Sequence[Host]], T], cluster: HostsConfig, *, after_a_loss: bool = False
) -> T:
    """Return `place` of the cluster's hosts, as soon as there are enough. Raises the ConfigError of
    `place`: at once in a cluster of our own, which no host joins, else after `_PLACEMENT_SECONDS`.
    After a loss it waits for seconds only, and raises EngineError."""
    seconds = _PLACEMENT_SECONDS if cluster.ray_address else 0.0
    if after_a_loss:
        seconds = min(seconds, _SECONDS_AFTER_A_LOSS)
    deadline = time.monotonic() + seconds
    is_waiting = False
    while True:
        try:
            return place(alive_hosts())
        except ConfigError as error:
            if time.monotonic() >= deadline:
                if not after_a_loss:
                    raise
                raise EngineError(f"what is left of the cluster is not enough. {error}") from error
            if not is_waiting:
                logger.info("waiting for more hosts: %s", error)
            is_waiting = True
        time.sleep(_POLL_SECONDS)


@contextmanager
def watching(address: str, on_loss: Callable[[EngineError], None]) -> Iterator[None]:
    """Hold a connection to the GCS at `address` within the context. Call `on_loss` once, in another
    thread, if it ends and no new one can be made within PATIENCE."""
    has_ended = threading.Event()
    threading.Thread(target=_watch, args=(address, has_ended, on_loss), daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def _watch(
    address: str, has_ended: threading.Event, on_loss: Callable[[EngineError], None]
) -> None:
    answered = time.monotonic()
    is_missed = False
    while not has_ended.is_set():
        try:
            with _connected(address) as connection:
                if is_missed:
                    logger.warning("the head of the Ray cluster at %s answers again", address)
                is_missed = False
                _hold(connection, has_ended)
                answered = time.monotonic()
        except OSError as error:
            if has_ended.wait(_SECONDS_BETWEEN_LOOKS):
                return
            if not is_missed:
                logger.warning("the head of the Ray cluster at %s does not answer", address)
            is_missed = True
            if time.monotonic() - answered > PATIENCE:
                on_loss(_loss_of_head(address, error))
                return


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE / 2)
    for option, level, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)
    return connection


def _hold(connection: socket.socket, has_ended: threading.Event) -> None:
    """Return when the other end closes the connection; a GCS also closes a silent one."""
    connection.settimeout(_SECONDS_BETWEEN_LOOKS)
    while not has_ended.is_set():
        try:
            if not connection.recv(4096):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def _loss_of_head(address: str, error: OSError) -> EngineError:
    return EngineError(
        f"the head of the Ray cluster at {address} is gone ({error.strerror or error}, for "
        f"{PATIENCE:.0f} seconds), and nothing on any host can be started or asked without it. Start it "
        "and the other hosts again (`ray start`), then this command, a run that saves with --load."
    )
