"""The tensors of a Hugging Face checkpoint as views of a model's parameters.

transformers may rename a parameter when it loads a checkpoint, or fuse several tensors into one:
all experts of a layer become two parameters. Everything that leaves the trainer (a push, an
exported checkpoint) and everything that enters an engine has the checkpoint's names, the only ones
that every implementation of a model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onpolicy.errors import ConfigError


class _Part(NamedTuple):
    """Shape, stride and offset of a checkpoint's tensor within a parameter; None if it is the whole."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(view: Tensor, tensor: Tensor) -> _Part | None:
        if view is tensor:
            return None
        return _Part(
            view.shape, view.stride(), int(view.storage_offset() - tensor.storage_offset())
        )

    def cut_out(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


_Layout = tuple[str, torch.Size, tuple[int, ...]]
"""Name, shape and strides of a model's parameter."""

_known: WeakKeyDictionary[PreTrainedModel, dict[_Layout, dict[str, _Part | None]]] = (
    WeakKeyDictionary()
)


def stored_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return `tensor`, a value of the parameter `name`, as `save_pretrained` would write it.

    The result holds views of `tensor` under the checkpoint's names.
    Raise ConfigError if the checkpoint holds a tensor that is no view of `tensor`. The layout is
    cached, since transformers scans the whole model for each tensor.
    """
    known = _known.setdefault(model, {})
    layout = (name, tensor.shape, tensor.stride())
    if layout not in known:
        views = _as_written(model, name, tensor)
        known[layout] = {key: _Part.of(view, tensor) for key, view in views.items()}
    parts = known[layout]
    return {key: tensor if part is None else part.cut_out(tensor) for key, part in parts.items()}


def _as_written(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    with _Views():
        stored: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    memory = _memory(tensor)
    if any(_memory(view) != memory for view in stored.values()):
        raise ConfigError(
            f"parameter={name}: transformers stores it in a checkpoint in another order "
            f"({', '.join(sorted(stored))[:200]}), so it cannot be pushed to an engine piece by "
            "piece. Choose another checkpoint."
        )
    return stored


class _Views(TorchFunctionMode):
    """A mode that keeps slices of a tensor as views; transformers copies each slice from 5.13 on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Return an identifier of a tensor's memory, on the meta device too."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
