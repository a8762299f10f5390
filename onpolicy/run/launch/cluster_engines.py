"""A command's engines on the hosts of a cluster: with a trainer, or servers alone.

`require_shared` checks that the other hosts see a directory of this host.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.cluster.engine_host import Places, RequireRoom
from onpolicy.cluster.placement import (
    Host,
    Placement,
    Slot,
    hosts_here,
    placement_here,
    placement_of,
    placement_of_trainer,
)
from onpolicy.cluster.ray_session import (
    alive_hosts,
    free_memory_on,
    gpus_on,
    session,
    told_by,
    when_it_fits,
)
from onpolicy.config import TrainConfig
from onpolicy.config.groups import HostsConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.size import ModelSize
from onpolicy.rollout.base import RolloutGroup
from onpolicy.rollout.server import EngineServer
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.engine_specs import make_rollout_group, places_in, rollout_spec
from onpolicy.run.launch.memory import ProcessMemory, RunMemory, require_gpu, require_host
from onpolicy.system.free_memory import Gpu
from onpolicy.training import Trainer

logger = logging.getLogger(__name__)

Held = Callable[[int, int], list[ProcessMemory]]
"""A function (ranks of the trainer, servers) -> their processes' memory on one host."""

PlaceOn = Callable[[Sequence[Host]], Placement]

GpusOf = Mapping[Host, Sequence[Gpu]]
"""The result of `gpus_on`: each host's GPUs by number."""

MakeEngines = Callable[..., EnginePair]
"""A factory with the arguments of `EnginePair`, less its own `make_trainer`."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory needs of a command's processes, wherever they are placed."""

    held: Held

    run: RunMemory | None = None
    """The run's own model of its memory, if the command is a run."""

    @staticmethod
    def of(
        config: TrainConfig,
        hf_config: PretrainedConfig,
        contract: NumericsContract,
        longest_sequence: int,
    ) -> Needs:
        """Return the needs of a run whose longest sequence has `longest_sequence` tokens."""
        spec = rollout_spec(config, hf_config, contract, longest_sequence)
        size = ModelSize.of(
            hf_config, config.model.trust_remote_code, contract.adapter, config.model.tower_of
        )
        run = RunMemory(config, hf_config, spec, size)
        return Needs(run.with_push, run)


class OnCluster:
    """A factory of a run's engines on the hosts of its cluster, which this process has joined."""

    def __init__(self, config: TrainConfig, contract: NumericsContract):
        self.config, self.contract = config, contract
        self._places: Places | None = None
        self._needs: Needs | None = None

    def make_engines(
        self,
        own: TrainConfig,
        hf_config: PretrainedConfig,
        own_contract: NumericsContract,
        directory: Path,
        longest_sequence: int,
        make_rollout: Callable[..., RolloutGroup] = make_rollout_group,
    ) -> EnginePair:
        """Place engines and ranks on the present hosts, log their places, and return them. Raises
        ConfigError if they do not fit the hosts, or the memory of one of them. A second call, after
        a loss, raises EngineError instead, and does not wait for other hosts to join."""
        config, is_again = self.config, self._places is not None
        if config.cluster.ray_address:
            self._needs = Needs.of(own, hf_config, own_contract, longest_sequence)
        place = partial(fitting, partial(placement_of, config, self.contract), self._needs)
        placement = _said(*when_it_fits(place, config.cluster, after_a_loss=is_again))
        self._places = places_in(placement, config, require_room_of(self._needs))
        return EnginePair(
            own,
            hf_config,
            own_contract,
            directory,
            longest_sequence=longest_sequence,
            make_rollout=partial(make_rollout, places=self._places),
            make_trainer=partial(_make_ranks, placement.trainer),
        )


@contextmanager
def on_cluster(config: TrainConfig, contract: NumericsContract) -> Iterator[OnCluster]:
    """Join the run's cluster, and yield the factory of its engines."""
    with session(config.cluster, config.engine.rollout_start_timeout):
        yield OnCluster(config, contract)


@contextmanager
def trainer_on_cluster(
    config: TrainConfig, contract: NumericsContract, needs: Needs, logs: Path
) -> Iterator[Trainer]:
    """Yield a trainer without servers on the hosts of the run's cluster. `logs`: the directory for the
    logs of its ranks. Raises ConfigError if it does not fit the hosts, or the memory of one of them."""
    asked = needs if config.cluster.ray_address else None
    place = partial(fitting, partial(placement_of_trainer, config, contract), asked)
    start_seconds = config.engine.rollout_start_timeout
    with session(config.cluster, start_seconds), ExitStack() as stack:
        placement = _said(*when_it_fits(place, config.cluster))
        trainer = _make_ranks(placement.trainer, config, contract, logs)
        stack.callback(trainer.close)
        yield trainer


@contextmanager
def places_on_cluster(
    cluster: HostsConfig, place: PlaceOn, cpu_threads: int = 0, needs: Needs | None = None
) -> Iterator[Places]:
    """Yield the places of servers without a trainer: on this host, or on the cluster at
    --ray-address, which this process joins meanwhile. Raises ConfigError if they do not fit, or, if
    their needs are given, if a host has too little memory."""
    with ExitStack() as stack:
        if cluster.ray_address:
            stack.enter_context(session(cluster))
            placement = _said(*when_it_fits(partial(fitting, place, needs), cluster))
        else:
            placement = _said(*fitting(place, None, hosts_here()))
        yield Places(
            placement,
            cpu_threads=cpu_threads,
            hosts=alive_hosts if cluster.ray_address else hosts_here,
            require_room=require_room_of(needs),
        )


def fitting(
    place: PlaceOn, needs: Needs | None, hosts: Sequence[Host]
) -> tuple[Placement, list[str]]:
    """Return a placement on hosts, and the log lines about it. needs: None to skip memory and GPU
    checks. Raises ConfigError if hosts are too few, or if one, or a GPU of one, has too little
    memory; ContractError if a host's GPUs are of another kind than this one's."""
    placement = place(hosts)
    lines = placement.describe()
    if needs is None:
        return placement, lines
    if placement.device == "cuda":
        here = [host for host in hosts if host.is_here]
        found = gpus_on(tuple(dict.fromkeys((*here, *placement.hosts))))
        require_same_kind(placement, found)
        lines += require_gpus(placement, needs, found)
    return placement, lines + require_hosts(placement, needs, free_memory_on(placement.hosts))


def require_same_kind(placement: Placement, found: GpusOf) -> None:
    """Raise ContractError if a GPU in use has another compute capability than this host's GPUs."""
    ours = next((gpus for host, gpus in found.items() if host.is_here), ())
    for host in placement.hosts:
        for number, gpu in enumerate(found[host]):
            if ours and number in placement.gpus(host) and gpu.capability != ours[0].capability:
                raise ContractError(
                    f"{host}: its GPU {number} is {_kind(gpu)}, and this host, from which the contract "
                    f"was made, has {_kind(ours[0])}. All that compute must be of one kind: take that "
                    "host out of the cluster, or start the command on a host like it."
                )


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {'.'.join(map(str, gpu.capability))})"


def require_gpus(placement: Placement, needs: Needs, found: GpusOf) -> list[str]:
    """Return the memory of the fullest GPU in use on each host, in words. Raises ConfigError for the
    first host whose processes do not see those GPUs, or where one has too little free memory."""
    lines: list[str] = []
    for host in placement.hosts:
        taken, there = placement.gpus(host), found[host]
        if max(taken) >= len(there):
            raise ConfigError(
                f"{host}: {len(there)} GPUs are seen there, and its node of the cluster counts num_gpus="
                f"{host.num_gpus}. Join it again with as many as there are (`ray start --num-gpus "
                f"{len(there)}`), or let its processes see all of them (CUDA_VISIBLE_DEVICES)."
            )
        processes, shared = needs.held(*placement.counts(host)), placement.shared_gpus(host)
        for numbers, is_shared in ((shared, True), (taken - shared, False)):
            if numbers:
                fullest = min(numbers, key=lambda number: there[number].free)
                name, free = f"GPU {fullest} of {host}", there[fullest].free
                lines.append(require_gpu(processes, name, free, needs.run if is_shared else None))
    return lines


def require_hosts(placement: Placement, needs: Needs, free: Mapping[Host, int]) -> list[str]:
    """Return the memory sum of each host, in a line each. free: bytes that new processes may take
    there. Raises ConfigError for the first host whose ranks and servers do not fit."""
    return [
        require_host(needs.held(*placement.counts(host)), str(host), free[host], placement.device)
        for host in placement.hosts
    ]


def require_room_of(needs: Needs | None) -> RequireRoom:
    """Return the memory check for engines that move to other hosts. needs: None to check nothing."""

    def require_room(before: Placement, after: Placement) -> None:
        pairs = list(zip(before.engines, after.engines, strict=True))
        new = [slot for old, slot in pairs if old.host.name != slot.host.name]
        if needs is None or not new:
            return
        moved = Placement((), tuple(new))
        if moved.device == "cuda":
            require_gpus(moved, needs, gpus_on(moved.hosts))
        require_hosts(moved, needs, free_memory_on(moved.hosts))

    return require_room


def planned(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    longest_sequence: int,
) -> list[str]:
    """Return the places that a run would use at present, a line for each host. If the run would be
    refused, return the reason instead: a dry run reports it, since the run may be made elsewhere."""
    try:
        if not config.cluster.ray_address:
            return placement_here(config, contract).describe()
        needs = Needs.of(config, hf_config, contract, longest_sequence)
        with session(config.cluster) as hosts:
            return fitting(partial(placement_of, config, contract), needs, hosts)[1]
    except (ConfigError, ContractError) as error:
        return [f"here and now the run would be refused: {error}"]


def _said(placement: Placement, lines: Sequence[str]) -> Placement:
    for line in lines:
        logger.info("%s", line)
    return placement


def _make_ranks(
    slots: tuple[Slot, ...], config: TrainConfig, contract: NumericsContract, logs: Path
) -> Trainer:
    from onpolicy.cluster.trainer_ranks import TrainerRanks  # imports Ray, which a session prepares

    return TrainerRanks(config, contract, logs, slots)


def require_shared_by_servers(flag: str, directory: Path, servers: Sequence[EngineServer]) -> None:
    """Check the hosts of these servers with `require_shared`."""
    taken = {server.spec.node for server in servers} - {""}
    if taken:
        require_shared(flag, directory, [host for host in alive_hosts() if host.name in taken])


def require_shared(flag: str, directory: Path, hosts: Sequence[Host]) -> None:
    """Raise ConfigError for the first host that does not see this `directory`, named by `flag`."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="seen_by_") as file:
        mark = Path(file.name)
        seen = told_by(hosts, lambda: mark.exists(), f"whether {directory} is there")
    for host, is_seen in seen.items():
        if not is_seen:
            raise ConfigError(
                f"{flag}: {host} does not see {directory}, and a server there needs it. Give a "
                "directory of a file system that all hosts share."
            )
