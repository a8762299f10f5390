"""Whether what is placed on each host of a cluster fits the memory that is free there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from transformers import PretrainedConfig

from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import Placement
from onpolicy.cluster.places import RequireRoom
from onpolicy.cluster.session import free_memory_on
from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.size import ModelSize
from onpolicy.run.engine_specs import rollout_spec
from onpolicy.run.memory import ProcessMemory, RunMemory
from onpolicy.run.memory_checks import require_host

Held = Callable[[int, int], list[ProcessMemory]]
"""(ranks of the trainer, servers) -> what they hold on one host."""

PlaceOn = Callable[[Sequence[Host]], Placement]


def held_by(
    config: TrainConfig,
    hf_config: PretrainedConfig,
    contract: NumericsContract,
    longest_sequence: int,
) -> Held:
    """What a run's processes hold; its longest sequence has so many tokens."""
    size = ModelSize.of(hf_config, config.model.trust_remote_code)
    spec = rollout_spec(config, hf_config, contract, longest_sequence)
    return RunMemory(config, hf_config, spec, size).with_push


def fitting(
    place: PlaceOn, held: Held | None, hosts: Sequence[Host]
) -> tuple[Placement, list[str]]:
    """A placement on hosts, and what to say of it. held: None if memory is not asked for.

    Raises ConfigError if hosts are too few, or if one without GPUs has too little memory.
    """
    placement = place(hosts)
    lines = placement.describe()
    if held is not None and placement.device == "cpu":
        lines += require_hosts(placement, held, free_memory_on(placement.hosts))
    return placement, lines


def require_hosts(placement: Placement, held: Held, free: Mapping[Host, int]) -> list[str]:
    """The sum on each host, in a line each; `free`: bytes that new processes may take there.

    Raises ConfigError for the first host whose ranks and servers do not fit.
    """
    return [
        require_host(held(*placement.counts(host)), str(host), free[host])
        for host in placement.hosts
    ]


def require_room_of(held: Held | None) -> RequireRoom:
    """What asks hosts for the memory of engines that move there. held: None if it is not asked for."""

    def require_room(before: Placement, after: Placement) -> None:
        pairs = zip(before.engines, after.engines, strict=True)
        moved = Counter(new.host for old, new in pairs if old.host.name != new.host.name)
        if held is not None and after.device == "cpu":
            free = free_memory_on(tuple(moved))
            for host, servers in moved.items():
                require_host(held(0, servers), str(host), free[host])

    return require_room
