"""Conversion of Hugging Face weights to Megatron's parameters and back, exactly, a few at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from onpolicy.models.lora.adapters import FactorValues, is_adapters
from onpolicy.models.weight_files import VALUE_HEAD, CheckpointReader
from onpolicy.training import distributed
from onpolicy.training.megatron.gpt_model import PolicyGptModel
from onpolicy.training.megatron.parts import Part, is_expert
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.megatron.weight_map import HEAD, WeightMap
from onpolicy.weights.digest import WeightBucket, WeightPart


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in the layout: its pipeline stage, and its shards of linears and of experts."""

    stage: int
    tp_rank: int
    ep_rank: int

    @staticmethod
    def mine() -> Place:
        return Place(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )


def load_hf_weights(model: nn.Module, path: str | Path) -> None:
    """Fill this rank's parameters from a checkpoint; every rank reads its own blocks, once.

    Raises ConfigError that lists the names if tensors are missing, unknown or of other shapes.
    """
    policy = unwrap(model)
    weight_map = weight_map_of(policy)
    reader = CheckpointReader(path)
    parameters, place = global_parameters(policy), Place.mine()
    shapes, unread = weight_map.stored_shapes(), policy.config.unread
    assert parameters.keys() == set(weight_map.parameters(place.stage))
    if policy.has_values:
        # A missing value head starts as zeros, and the output projection is not read.
        shapes = {n: s for n, s in shapes.items() if n in reader or not n.startswith(VALUE_HEAD)}
        unread = (*unread, re.escape(HEAD))
    reader.require(shapes, unread)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if is_adapters(name):  # no checkpoint has them
                continue
            filled = 0
            parameter.zero_()  # padding rows of a vocabulary that does not divide
            for part in weight_map.parts(name, place.tp_rank, place.ep_rank):
                if part.name in shapes:
                    block = reader.read(part.name, part.source)
                    parameter[part.target].copy_(block)
                    filled += block.numel()
            may_lack = name.startswith(("embedding.", "output_layer.", "value_head."))
            assert may_lack or filled == parameter.numel(), name


@torch.no_grad()
def fill_adapters(model: nn.Module, values: FactorValues) -> None:
    """Set the adapters' weights, each rank its shards."""
    policy, place = unwrap(model), Place.mine()
    weight_map = weight_map_of(policy)
    shapes = weight_map.shapes()
    for name, parameter in global_parameters(policy).items():
        if is_adapters(name):
            for part in weight_map.parts(name, place.tp_rank, place.ep_rank):
                whole = values(part.name, torch.Size(shapes[part.name]))
                if whole is not None:
                    parameter[part.target].copy_(whole[part.source])


def export_buckets(
    model: nn.Module,
    max_bytes: int,
    part: WeightPart = "all",
    ranks: Collection[int] = (0,),
    masters: Mapping[str, Tensor] | None = None,
) -> Iterator[WeightBucket]:
    """Yield whole tensors of a part under their Hugging Face names, `max_bytes` at a time, in fixed
    order.

    It is collective: every rank has to iterate over all buckets. They are full on `ranks` and empty
    elsewhere; a tensor larger than `max_bytes` is a bucket of its own. Tensors have the parameters'
    dtype, buffers (a router's correction of its scores) their own, in buckets of one dtype each.
    `masters`, by the global names of parameters, replace them.
    """
    policy = unwrap(model)
    weight_map = weight_map_of(policy)
    parameters = {**global_parameters(policy), **(masters or {})}
    shapes = weight_map.shapes()
    if part != "all":
        frozen = _frozen_names(policy)
        shapes = {name: s for name, s in shapes.items() if (name in frozen) == (part == "frozen")}
    dtypes = {
        name: torch.float32 if weight_map.is_buffer(name) else policy.config.params_dtype
        for name in shapes
    }
    holders = _holders(weight_map, _all_places())
    device = next(iter(parameters.values())).device
    for names in _plan(shapes, dtypes, max_bytes):
        bucket: dict[str, Tensor] = {}
        if distributed.rank() in ranks:
            bucket = {
                name: torch.empty(shapes[name], dtype=dtypes[name], device=device) for name in names
            }
        _collect(bucket, [held for name in names for held in holders[name]], parameters, ranks)
        yield list(bucket.items())


def _frozen_names(policy: PolicyGptModel) -> set[str]:
    """Return the names of all frozen Hugging Face tensors, on any rank; collective."""
    weight_map, first, place = weight_map_of(policy), first_layer(policy), Place.mine()
    ours = {
        part.name
        for name, parameter in policy.named_parameters()
        if not parameter.requires_grad
        for part in weight_map.parts(global_name(name, first), place.tp_rank, place.ep_rank)
    }
    return set().union(*distributed.gather(ours, None))


def _all_places() -> list[Place]:
    mine = Place.mine()
    places = [mine] * distributed.world_size()
    dist.all_gather_object(places, mine)
    return places


@dataclass(frozen=True, slots=True)
class _Held:
    """A part, the parameter that holds it, and the rank that sends it."""

    part: Part
    parameter: str
    rank: int


def _holders(weight_map: WeightMap, places: list[Place]) -> dict[str, list[_Held]]:
    """Return the parts that make up each Hugging Face tensor, each from the first rank that holds it."""
    first: dict[tuple[str, int, int], int] = {}
    for rank, place in enumerate(places):
        for parameter in weight_map.parameters(place.stage):
            ep_rank = place.ep_rank if is_expert(parameter) else 0
            first.setdefault((parameter, place.tp_rank, ep_rank), rank)
    holders: dict[str, list[_Held]] = {}
    seen: set[tuple[str, str]] = set()
    # Whole parameters are on several ranks; only the first one sends them.
    for (parameter, tp_rank, ep_rank), rank in first.items():
        for part in weight_map.parts(parameter, tp_rank, ep_rank):
            key = (part.name, str(part.source))
            if key not in seen:  # norms are on all ranks, tied embeddings on two stages
                seen.add(key)
                holders.setdefault(part.name, []).append(_Held(part, parameter, rank))
    return holders


def _plan(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype], max_bytes: int
) -> list[list[str]]:
    plan: list[list[str]] = []
    size = 0
    for name, shape in shapes.items():
        tensor_bytes = torch.Size(shape).numel() * dtypes[name].itemsize
        is_alike = bool(plan) and dtypes[plan[-1][-1]] == dtypes[name]
        if not is_alike or size + tensor_bytes > max_bytes:
            plan.append([])
            size = 0
        plan[-1].append(name)
        size += tensor_bytes
    return plan


def _collect(
    bucket: dict[str, Tensor],
    held: list[_Held],
    parameters: dict[str, Tensor],
    ranks: Collection[int],
) -> None:
    """Copy every part into the buckets of `ranks`; a rank sends all its parts in one message."""
    me = distributed.rank()
    for rank in sorted({part.rank for part in held}):  # so that no two wait for each other
        parts = [h for h in held if h.rank == rank]
        targets = [bucket[h.part.name][h.part.source] for h in parts] if me in ranks else []
        blocks: Sequence[Tensor] = ()
        if me == rank:
            blocks = [parameters[h.parameter][h.part.target].detach() for h in parts]
            if others := sorted(set(ranks) - {me}):
                message = torch.cat([block.reshape(-1) for block in blocks])
                for other in others:
                    dist.send(message, other)
        elif me in ranks:
            sizes = [target.numel() for target in targets]
            message = targets[0].new_empty(sum(sizes))
            dist.recv(message, rank)
            blocks = message.split(sizes)
        for target, block in zip(targets, blocks if targets else (), strict=True):
            target.copy_(block.view(target.shape))


def unwrap(model: nn.Module) -> PolicyGptModel:
    unwrapped: PolicyGptModel = unwrap_model(model)
    return unwrapped


def weight_map_of(policy: PolicyGptModel) -> WeightMap:
    config = policy.config
    layout = MegatronLayout(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
    )
    return WeightMap(config.hf_config, layout, policy.has_values, config.adapter)


def global_parameters(policy: PolicyGptModel) -> dict[str, Tensor]:
    """Return parameters, and buffers that a checkpoint holds, by global names."""
    weight_map, first = weight_map_of(policy), first_layer(policy)
    buffers = [(name, x) for name, x in policy.named_buffers() if weight_map.is_buffer(name)]
    return {global_name(name, first): x for name, x in (*policy.named_parameters(), *buffers)}


def first_layer(policy: PolicyGptModel) -> int:
    """Return the index in the model, from 0, of the first layer of this pipeline stage."""
    layers = policy.decoder.layers
    return int(layers[0].layer_number - 1 if len(layers) else 0)


def global_name(name: str, first: int) -> str:
    """Return the whole model's name of a stage's `name`; the stage's layers begin with index `first`."""
    pieces = name.split(".")
    if pieces[:2] == ["decoder", "layers"]:
        pieces[2] = str(int(pieces[2]) + first)
    return ".".join(pieces)
