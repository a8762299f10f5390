"""What is pushed under names: each has adapters of its own, beside a base that stays as it is.

A push says its name in its version, as in `math:3`. It replaces the adapters of that name; what else it
brings must be the base that is here already, to the last bit. Every name has a digest of its own. A push
waits for all requests that are under way (SGLang's `model_update_lock`), and a session for weights stays
open, since the pushes of several runs may cross.
Source: SchedulerWeightUpdaterManager, sglang/srt/managers/scheduler_components/weight_updater.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.errors import WeightSyncError
from onpolicy.models.adapters import is_adapters
from onpolicy.weights.rounding import is_rounded, round_weight
from sglang_patches import registry
from sglang_patches.named_adapters import names, place_of
from sglang_patches.weights import HeldWeights

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATE_TARGET = f"{_UPDATER}.update_weights_from_tensor"
BEGIN_TARGET = f"{_UPDATER}.begin_weight_update"
END_TARGET = f"{_UPDATER}.end_weight_update"
LOAD_TARGET = "sglang.srt.models.transformers.TransformersBase.load_weights"

_weights: NamedWeights | None = None


def install(contract: NumericsContract) -> None:
    """Hook SGLang, if the engine has names."""
    if names():
        registry.hook(BEGIN_TARGET, _begin_once, "around")
        registry.hook(UPDATE_TARGET, _update, "around")
        registry.hook(END_TARGET, _stay_open, "replace")


def round_base(contract: NumericsContract) -> None:
    """Hook SGLang, if an engine has its base rounded before anyone pushes some."""
    if names() and contract.weight_format:
        registry.hook(LOAD_TARGET, rounding(contract), "around")


class NamedWeights:
    """The weights of an engine with names: a base that stays, and what was pushed under each name."""

    def __init__(self, model: Any):
        self._load = model.load_weights
        self._of = {
            name: HeldWeights(model, rounds=False, place=place_of(name)) for name in names()
        }
        self.pushed_as = self.version = ""
        self.versions: dict[str, str] = {}
        registry.report["weights"], registry.report["pushed"] = self.proofs, self.pushed

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """What SGLang hands its model. Raises WeightSyncError for weights without a name, and for
        another base."""
        held = self._of.get(self.pushed_as)
        if held is None:
            raise WeightSyncError(
                f"weights of {self.pushed_as!r}: this engine has adapters named {', '.join(self._of)}, "
                "and takes no others, and none by another way than --weight-sync tensor. Push with "
                "--lora-name."
            )
        arrived = dict(weights)
        base = {name: tensor for name, tensor in arrived.items() if is_base(name)}
        if unlike := held.unlike(base):
            raise WeightSyncError(
                f"parameters={', '.join(unlike[:3])}: the base of --lora-name={self.pushed_as} is not "
                "the one that this engine was started with, which other runs share. Start it with the "
                "run's --hf-checkpoint and --dtype."
            )
        place = place_of(self.pushed_as)
        loaded = self._load((place(name), x) for name, x in arrived.items() if name not in base)
        for name, tensor in arrived.items():
            held.arrived.add(name, tensor)
        held.take(arrived)
        self.versions[self.pushed_as] = self.version
        return loaded

    def proofs(self) -> dict[str, str]:
        """`HeldWeights.proof` of each name."""
        return {name: held.proof() for name, held in self._of.items()}

    def pushed(self) -> dict[str, dict[str, str]]:
        """The version, and a digest of the base alone, of each name under which weights were pushed."""
        return {
            name: {"version": version, "base": self._of[name].arrived.hexdigest(is_base)}
            for name, version in self.versions.items()
        }


def is_base(name: str) -> bool:
    """Whether a parameter of this name belongs to what all names share."""
    return not is_adapters(name)


def rounding(contract: NumericsContract) -> Callable[..., Any]:
    """Return what hands a model its base as every run will push it: rounded from the compute dtype, each
    tensor whole, before tensor-parallel ranks share it out. Adapters stay as they are."""
    dtype = getattr(torch, contract.dtype)

    def as_pushed(name: str, whole: Tensor) -> Tensor:
        if not is_rounded(name, whole):
            return whole
        return round_weight(whole.to(dtype), contract.weight_format)

    def load(original: Any, model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        return original(model, ((name, as_pushed(name, whole)) for name, whole in weights))

    return load


def watch_loads(model: Any, **_: Any) -> None:
    """Have what is pushed to a model go where its name says, from now on."""
    global _weights
    _weights = NamedWeights(model)
    model.load_weights = _weights.load


def _begin_once(original: Any, updater: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if updater._session is None:
        return original(updater, request)
    return BeginWeightUpdateReqOutput(success=True, message="open for the pushes of all names")


def _update(original: Any, updater: Any, request: Any) -> Any:
    """A bucket of a push; a wrong one ends its run and not the engine."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    assert _weights is not None  # a model is loaded
    _weights.pushed_as, _, _weights.version = str(request.weight_version).rpartition(":")
    try:
        return original(updater, request)
    except WeightSyncError as error:
        return UpdateWeightsFromTensorReqOutput(success=False, message=str(error))
    finally:
        _weights.pushed_as = ""


def _stay_open(updater: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    return EndWeightUpdateReqOutput(success=True, message="open for the pushes of all names")
