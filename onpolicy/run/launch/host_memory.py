"""Whether what is placed on each host of a cluster fits the GPUs and the memory that are free there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from transformers import PretrainedConfig

from onpolicy.cluster.engine_places import RequireRoom
from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import Placement
from onpolicy.cluster.session import free_memory_on, gpus_on
from onpolicy.config import TrainConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.size import ModelSize
from onpolicy.run.launch.colocation import RequireSize, require_size
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.memory_checks import require_gpu, require_host
from onpolicy.run.launch.process_memory import ProcessMemory, RunMemory
from onpolicy.system.gpus import Gpu

Held = Callable[[int, int], list[ProcessMemory]]
"""(ranks of the trainer, servers) -> what they hold on one host."""

PlaceOn = Callable[[Sequence[Host]], Placement]

GpusOf = Mapping[Host, Sequence[Gpu]]
"""What `gpus_on` found: by number, of each host."""


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


def sharing_of(config: TrainConfig, contract: NumericsContract) -> RequireSize | None:
    """What a GPU must hold that a rank and a server of a run share; None if none is shared."""
    return require_size(config, contract) if config.engine.colocate else None


def fitting(
    place: PlaceOn,
    held: Held | None,
    hosts: Sequence[Host],
    shared: RequireSize | None = None,
) -> tuple[Placement, list[str]]:
    """A placement on hosts, and what to say of it. held: None if neither memory nor GPUs are asked for.

    Raises ConfigError if hosts are too few, or if one, or a GPU of one, has too little memory;
    ContractError if a host's GPUs are of another kind than this one's.
    """
    placement = place(hosts)
    lines = placement.describe()
    if held is None:
        return placement, lines
    if placement.device == "cuda":
        here = [host for host in hosts if host.is_here]
        found = gpus_on(tuple(dict.fromkeys((*here, *placement.hosts))))
        require_same_kind(placement, found)
        require_shared_gpus(placement, shared, found)
        return placement, lines + require_gpus(placement, held, found)
    return placement, lines + require_hosts(placement, held, free_memory_on(placement.hosts))


def require_same_kind(placement: Placement, found: GpusOf) -> None:
    """Raise ContractError for a host whose GPUs, of which some are taken, are of another compute
    capability than those of this host, from which the contract was made."""
    ours = next((gpus for host, gpus in found.items() if host.is_here), ())
    for host in placement.hosts:
        for number, gpu in enumerate(found[host]):
            if ours and number in placement.gpus(host) and gpu.capability != ours[0].capability:
                raise ContractError(
                    f"{host}: its GPU {number} is {_kind(gpu)}, and this host, from which the contract "
                    f"was made, has {_kind(ours[0])}. All that compute must be of one kind: take that "
                    "host out of the cluster, or start the command on a host like it."
                )


def require_shared_gpus(placement: Placement, shared: RequireSize | None, found: GpusOf) -> None:
    """Raise ConfigError for a GPU that a rank and a server share, and that is too small for both."""
    of_servers = {(slot.host.name, gpu) for slot in placement.engines for gpu in slot.devices}
    for slot in placement.trainer:
        for number in slot.devices:
            if shared and (slot.host.name, number) in of_servers and number < len(found[slot.host]):
                shared(f"GPU {number} of {slot.host}", found[slot.host][number].size)


def _kind(gpu: Gpu) -> str:
    return f"{gpu.name} (compute capability {'.'.join(map(str, gpu.capability))})"


def require_gpus(placement: Placement, held: Held, found: GpusOf) -> list[str]:
    """What the fullest GPU that is taken on each host must hold, in a line for each.

    Raises ConfigError for the first host whose processes do not see those GPUs, or where one has too
    little memory free.
    """
    return [
        _require_gpus_of(host, placement.gpus(host), held(*placement.counts(host)), found[host])
        for host in placement.hosts
    ]


def _require_gpus_of(
    host: Host, taken: set[int], processes: Sequence[ProcessMemory], found: Sequence[Gpu]
) -> str:
    if max(taken) >= len(found):
        raise ConfigError(
            f"{host}: {len(found)} GPUs are seen there, and its node of the cluster counts num_gpus="
            f"{host.num_gpus}. Join it again with as many as there are (`ray start --num-gpus "
            f"{len(found)}`), or let its processes see all of them (CUDA_VISIBLE_DEVICES)."
        )
    fullest = min(taken, key=lambda number: found[number].free)
    return require_gpu(processes, f"GPU {fullest} of {host}", found[fullest].free)


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
        pairs = list(zip(before.engines, after.engines, strict=True))
        new = [slot for old, slot in pairs if old.host.name != slot.host.name]
        if held is None or not new:
            return
        moved = Placement((), tuple(new))
        if moved.device == "cuda":
            require_gpus(moved, held, gpus_on(moved.hosts))
        else:
            require_hosts(moved, held, free_memory_on(moved.hosts))

    return require_room
