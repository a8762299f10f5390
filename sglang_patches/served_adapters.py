"""SGLang's own adapters in a stock engine: watched as they load, and without a GPU's memory on a CPU.

A push unloads the adapters of the one before and loads others under the same name. SGLang drops in
silence what it has no place for, such as a linear that its model names otherwise; here that load fails.
The digest that the engine reports is that of the tensors which the last load brought; without any it is
that of nothing. The model's own weights stay as they were loaded: SGLang's loaders do not find those of
a linear that has adapters, and pass over them, so no others are taken.

SGLang asks for pinned memory whether there is a GPU or not, and PyTorch raises where there is none. On a
CPU nothing is pinned. This part can go when SGLang asks first.
Source: sglang/srt/lora/lora_manager.py, sglang/srt/lora/backend/torch_backend.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onpolicy.contract import NumericsContract
from onpolicy.errors import WeightSyncError
from onpolicy.models.peft_format import PREFIX
from onpolicy.weights.digest import WeightDigest
from sglang_patches import registry

_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
LOAD_TARGET = f"{_MANAGER}.load_lora_adapter_from_tensors"
UNLOAD_TARGET = f"{_MANAGER}.unload_lora_adapter"
INIT_TARGET = f"{_MANAGER}.__init__"
BATCH_TARGET = f"{_MANAGER}.prepare_lora_batch"


def install(contract: NumericsContract) -> None:
    """Hook SGLang, if the engine has adapters of its."""
    if not contract.serves_adapter:
        return
    registry.hook(LOAD_TARGET, _load, "around")
    registry.hook(UNLOAD_TARGET, _unload, "before")
    if contract.device == "cpu":
        for target in (INIT_TARGET, BATCH_TARGET, LOAD_TARGET):
            registry.hook(target, _without_pinning, "around")


def watch_loads(model: Any, **_: Any) -> None:
    """Report no adapters, and let nothing take the place of the model's own weights."""
    _report({})

    def refuse(*_: Any, **__: Any) -> None:
        raise WeightSyncError(
            "weights of the model: this engine keeps the base that it loaded, and takes adapters alone. "
            "Push with --rollout-lora sglang."
        )

    model.load_weights = refuse


def stray(manager: Any, adapter_id: str) -> list[str]:
    """Weights of an adapter that no linear of the model would compute with."""
    layers = zip(manager.loras[adapter_id].layers, manager.lora_modules, strict=True)
    return sorted(
        name
        for layer, modules in layers
        for name in layer.weights
        if name.removeprefix(PREFIX).partition(".lora_")[0] not in modules
    )


def _load(original: Any, manager: Any, ref: Any, tensors: Any, *rest: Any, **more: Any) -> Any:
    # SGLang may keep what it was given; the memory that it came in has the next push.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    result = original(manager, ref, tensors, *rest, **more)
    if not result.success:
        return result
    if lost := stray(manager, ref.lora_id):
        manager.unload_lora_adapter(ref)
        return manager.create_lora_update_result(
            success=False,
            error_message=f"weights={lost}: SGLang's model has no linear of these names that would "
            "compute with them. Use --rollout-lora merged.",
        )
    _report(tensors)
    return result


def _unload(manager: Any, ref: Any) -> None:
    _report({})


def _report(tensors: dict[str, torch.Tensor]) -> None:
    digest = WeightDigest()
    for name, tensor in tensors.items():
        digest.add(name, tensor)
    registry.report["weights"] = digest.hexdigest()


def _without_pinning(original: Any, *args: Any, **kwargs: Any) -> Any:
    with _Unpinned():
        return original(*args, **kwargs)


class _Unpinned(TorchFunctionMode):
    """Memory that is asked for as pinned is ordinary memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        given = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **given)
