"""Keeps rounded weights in the memory that their format promises, and computes with all their bits.

The weights of linears and experts lie as codes and scales (`onpolicy/weights/packing.py`). Their
parameters stay what they are, but share one piece of memory, as large as what one module reads: before
that module runs, or its parameters are loaded or looked at, its weights are unpacked there. So
operators, loaders and checks find what they always do. A weight that cannot be packed without loss is
refused.

What the engine is started with is rounded on its way in, as every run will push it.
Source: load_model_with_memory_saver (sglang/srt/model_executor), TransformersBase.load_weights.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onpolicy.compat.process import give_back_buffers
from onpolicy.contract import PACKED_VARIABLE, NumericsContract
from onpolicy.errors import ContractError, WeightSyncError
from onpolicy.models.experts import AlignedExperts
from onpolicy.models.joint_linears import JointLinear
from onpolicy.weights.digest import WeightBucket
from onpolicy.weights.packing import PackedWeight, pack, unpack
from onpolicy.weights.rounding import FORMATS, is_rounded, round_weight
from sglang_patches import registry
from sglang_patches.experts import held_tensors
from sglang_patches.fusion import weights_memory
from sglang_patches.tensor_parallel import num_ranks

APART = 64
"""Pieces of memory begin at multiples of so many numbers, as operators like it."""

LOAD_TARGET = "sglang.srt.models.transformers.TransformersBase.load_weights"

ATTRIBUTE = "packed_weights"
"""What a model whose weights are packed has its `PackedModel` as."""

logger = logging.getLogger(__name__)


def are_asked_for() -> bool:
    """Whether the engine was told to pack its weights."""
    return bool(os.environ.get(PACKED_VARIABLE))


def install(contract: NumericsContract) -> None:
    """Hook SGLang, if an engine has its weights rounded before anyone pushes some."""
    if contract.weight_format and are_asked_for():
        registry.hook(LOAD_TARGET, rounding(contract), "around")


def rounding(contract: NumericsContract) -> Callable[..., Any]:
    """What hands a model its base as every run will push it: rounded from the compute dtype, each tensor
    whole, before tensor-parallel ranks share it out. Adapters stay as they are, and pushes."""
    dtype = getattr(torch, contract.dtype)

    def as_pushed(name: str, whole: Tensor) -> Tensor:
        if not is_rounded(name, whole):
            return whole
        return round_weight(whole.to(dtype), contract.weight_format)

    def load(original: Any, model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        if hasattr(model, ATTRIBUTE):
            return original(model, weights)
        return original(model, ((name, as_pushed(name, whole)) for name, whole in weights))

    return load


def pack_weights(runner: Any, contract: NumericsContract, joint: Sequence[JointLinear]) -> None:
    """Pack what an engine's model runner has loaded; `joint`: the linears that became one product."""
    if not (contract.weight_format and are_asked_for()):
        return
    with weights_memory(runner):
        packed = PackedModel(runner.model, contract.weight_format, joint)
    setattr(runner.model, ATTRIBUTE, packed)
    runner.model.load_weights = partial(packed.load, runner.model.load_weights)
    registry.report["packed_weights"] = packed.report()
    logger.info("packed weights: %s", packed.report())
    if contract.device == "cuda":
        torch.cuda.empty_cache()
    give_back_buffers()


def show(model: Any, name: str) -> None:
    """Have the parameter that a checkpoint calls `name` hold its weight, if that is packed."""
    packed: PackedModel | None = getattr(model, ATTRIBUTE, None)
    if packed is not None:
        packed.show(name)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Weights that are unpacked together: those of a module, or of several whose products are one."""

    modules: list[nn.Module]
    parameters: Sequence[nn.Parameter]
    names: Sequence[str]
    """What a checkpoint calls the parameters, or their parts."""

    packed: dict[str, PackedWeight] = field(default_factory=dict)


class PackedModel:
    """The weights of a model as codes and scales, and the memory that its parameters share."""

    def __init__(self, model: Any, weight_format: str, joint: Sequence[JointLinear]):
        self._model, self._format = model, weight_format
        held = {name: x for name, x in held_tensors(model).items() if is_rounded(name, x)}
        places = _places(model, joint, held, FORMATS[weight_format].block)
        if not places:
            raise ContractError(
                f"--rollout-pack-weights, --rollout-weight-format={weight_format}: no linear of "
                f"{type(model.model).__name__} is in whole blocks on each rank. Leave the first out."
            )
        self._place_of = {name: place for place in places for name in place.names}
        self._kept = held.keys() - self._place_of.keys()
        self._memory = _room_for(places)
        for place in places:
            place.packed.update({name: self._pack(name, held[name]) for name in place.names})
            _move(place.parameters, self._memory, joint)
            for module in place.modules:
                module.register_forward_pre_hook(lambda *_, place=place: self._unpack(place))
        self._held = held_tensors(model)
        model.model.register_forward_pre_hook(self._forget)
        self._unpacked: Place | None = None
        self._loading: Place | None = None

    def load(
        self, load_weights: Callable[..., set[str]], weights: Iterable[tuple[str, Tensor]]
    ) -> set[str]:
        """What the model does with weights that arrive, one place after another.

        Raises WeightSyncError for one that is not rounded as it should be, or that nobody knows.
        """
        loaded: set[str] = set()
        others: WeightBucket = []
        for place, group in itertools.groupby(weights, lambda pair: self._place_of.get(pair[0])):
            if place is None:
                others += group
                continue
            try:
                loaded |= self._load_into(place, load_weights, list(group))
            finally:
                self._loading = None
                self._forget()
        for name, weight in others:
            if is_rounded(name, weight) and name not in self._kept:
                raise WeightSyncError(
                    f"parameter={name}: the engine does not know where it keeps this weight packed. "
                    "Start it without --rollout-pack-weights, and report this."
                )
        return loaded | load_weights(others)

    def _load_into(
        self, place: Place, load_weights: Callable[..., set[str]], arrived: WeightBucket
    ) -> set[str]:
        self._forget()
        self._unpack(place)  # a base that several names share is compared and not loaded
        self._loading = place
        loaded = load_weights(arrived)
        now = held_tensors(self._model)
        for name, _ in arrived:
            if now[name].data_ptr() != self._held[name].data_ptr():
                raise WeightSyncError(
                    f"parameter={name}: SGLang's loader put it into memory of its own, where a packed "
                    "weight is not looked for. Start the engine without --rollout-pack-weights, and "
                    "report this."
                )
            new = self._pack(name, self._held[name])
            for old, tensor in zip(place.packed[name], new, strict=True):
                old.copy_(tensor)  # in the memory that a CUDA graph knows
        return loaded

    def show(self, name: str) -> None:
        """Have the parameter of this name hold its weight."""
        place = self._place_of.get(name)
        if place is None or place is self._loading:
            return
        self._forget()
        unpack(place.packed[name], self._format, self._held[name])

    def report(self) -> dict[str, int]:
        """How many weights are packed and how many are not, and the bytes of those that are."""
        packed = [place.packed[name] for name, place in self._place_of.items()]
        return {
            "packed": len(packed),
            "kept": len(self._kept),
            "bytes": sum(tensor.nbytes for weight in packed for tensor in weight),
            "bytes_unpacked": sum(self._held[name].nbytes for name in self._place_of),
        }

    def _unpack(self, place: Place) -> None:
        if place is self._unpacked:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():  # of a block of experts
            for name, weight in place.packed.items():
                unpack(weight, self._format, self._held[name])
        self._unpacked = place

    def _forget(self, *_: Any) -> None:
        """What is unpacked: nobody knows after a CUDA graph ran, or something else was shown."""
        self._unpacked = None

    def _pack(self, name: str, weight: Tensor) -> PackedWeight:
        try:
            return pack(weight, self._format)
        except ValueError as error:
            raise WeightSyncError(
                f"parameter={name}: {error}, {self._format}, so --rollout-pack-weights cannot keep it. "
                "Push with the --rollout-weight-format and --dtype that the engine was started with."
            ) from error


def _places(
    model: Any, joint: Sequence[JointLinear], held: dict[str, Tensor], block: tuple[int, int]
) -> list[Place]:
    """Those of linears and experts that have their weights in whole blocks, as a rank of several may
    not."""
    by_memory: dict[int, list[str]] = {}
    for name, weight in held.items():
        by_memory.setdefault(_memory(weight), []).append(name)
    together = {module: linear.linears for linear in joint for module in linear.linears}
    found: dict[str, Place] = {}
    for module in model.modules():
        if not reads_its_own(module):
            continue
        modules = list(together.get(module, [module]))
        every = [p for each in modules for p in each.parameters(recurse=False)]
        parameters = [p for p in every if _memory(p) in by_memory]
        names = [n for memory in dict.fromkeys(map(_memory, parameters)) for n in by_memory[memory]]
        if not all(_is_in_whole_blocks(held[name], block) for name in names):
            continue
        if names:
            place = found.setdefault(names[0], Place([], parameters, names))
            place.modules.extend(each for each in modules if each not in place.modules)
    return list(found.values())


def reads_its_own(module: nn.Module) -> bool:
    """Whether nothing but a module itself, when it is called, computes with its weights."""
    from sglang.srt.layers.linear import LinearBase

    return isinstance(module, LinearBase | AlignedExperts)


def _is_in_whole_blocks(weight: Tensor, block: tuple[int, int]) -> bool:
    return num_ranks() == 1 or all(
        not asked or size % asked == 0 for size, asked in zip(weight.shape, block, strict=True)
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _starts(parameters: Iterable[Tensor]) -> tuple[dict[int, int], int]:
    """Where each piece of memory that the parameters lie in begins among them, and the end of the last,
    counted in numbers."""
    starts: dict[int, int] = {}
    end = 0
    for parameter in parameters:
        if _memory(parameter) not in starts:
            starts[_memory(parameter)] = end
            size = parameter.untyped_storage().nbytes() // parameter.itemsize
            end += -(-size // APART) * APART
    return starts, end


def _room_for(places: Sequence[Place]) -> Tensor:
    most = max(places, key=lambda place: _starts(place.parameters)[1])
    return most.parameters[0].new_empty(_starts(most.parameters)[1])


def _move(parameters: Sequence[nn.Parameter], memory: Tensor, joint: Sequence[JointLinear]) -> None:
    """Let parameters lie in `memory`, and what several of them are parts of."""
    starts, _ = _starts(parameters)
    joined = [linear for linear in joint if _memory(linear.weight) in starts]
    for owner in [*parameters, *(linear.weight for linear in joined)]:
        start = starts[_memory(owner)] + owner.storage_offset()
        owner.data = memory.as_strided(owner.shape, owner.stride(), start)
