"""A stand-in for CUDA on CPU-only machines, which makes Megatron-core's CUDA calls use the CPU.

Megatron-core 0.16.1 creates small tensors with `device="cuda"` or on `torch.cuda.current_device()`,
synchronises streams, and recognises parameters by `torch.cuda.*Tensor` type names, even where nothing
else needs a GPU: in sequence parallelism (tensor_parallel/mappings.py), pipeline schedules and their
messages (pipeline_parallel/schedules.py, p2p_communication.py), activation recomputation
(tensor_parallel/random.py), DistributedDataParallel (distributed/param_and_grad_buffer.py), optimizers
(optimizer/*.py) and checkpoints (dist_checkpointing/strategies). With this module all of that runs
unchanged, over gloo, and can be developed and tested without a GPU.

Only Megatron's modules get a modified `torch`; other importers get the original. Two methods of tensors
are replaced for the whole process, since they belong to no module: `cuda()`, which would raise an error
otherwise, and `type()`, which returns `torch.cuda.FloatTensor` for a CPU tensor. None of this affects
the bits of a forward pass. It refuses to load where there is CUDA, and logs a warning when it loads.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onpolicy.errors import ContractError

logger = logging.getLogger(__name__)

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like",
)  # fmt: skip

_MODULES = (
    "dist_checkpointing.strategies.torch", "distributed", "models.gpt", "optimizer", "pipeline_parallel",
)  # fmt: skip
"""The parts of megatron.core that import all modules with CUDA names."""

_active = False


def activate() -> None:
    """Make Megatron run on the CPU in this process, for the rest of its life; further calls do
    nothing. Raises ContractError where there is CUDA."""
    global _active
    if torch.cuda.is_available():
        raise ContractError(
            "torch.cuda.is_available()=True: Megatron's stand-in for CUDA is for machines without it. "
            "Hide the GPUs (CUDA_VISIBLE_DEVICES=) to use it."
        )
    if _active:
        return
    _active = True
    logger.warning(
        "No CUDA here: Megatron's CUDA-named calls mean the CPU in this process "
        "(onpolicy/compat/megatron_on_cpu.py)."
    )
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    ours = _torch_on_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = ours  # type: ignore[attr-defined]
    Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    Tensor.type = _type_name(Tensor.type)  # type: ignore[method-assign]
    _replace_random_state()


def is_active() -> bool:
    return _active


class _View(ModuleType):
    """A module with some of its attributes replaced, for the modules that get this object instead."""

    def __init__(self, module: ModuleType, **replaced: Any):
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _torch_on_cpu() -> ModuleType:
    cuda = _View(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        Stream=_Stream,
        current_stream=lambda device=None: _Stream(),
        default_stream=lambda device=None: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _View(torch, cuda=cuda, **factories)


class _Stream:
    """A stream on the CPU, where everything is done when a call returns."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that creates tensors, on `cpu` if the device is `cuda`."""

    def create(*args: Any, **kwargs: Any) -> Tensor:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _type_name(type_of: Callable[..., Any]) -> Callable[..., Any]:
    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        is_name = isinstance(found, str) and not found.startswith("torch.cuda.")
        return found.replace("torch.", "torch.cuda.", 1) if is_name else found

    return named


def _replace_random_state() -> None:
    """Save and restore the CPU's generator instead of the GPU's, for recomputation."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
