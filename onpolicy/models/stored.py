"""The tensors of a Hugging Face checkpoint, seen from a model that holds them in another shape.

transformers may rename a parameter when it loads a checkpoint, or fuse several tensors into one:
all experts of a layer become two parameters. Whatever leaves the trainer (a push, an exported
checkpoint) and whatever enters an engine goes by the checkpoint's names, the only ones that every
implementation of a model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onpolicy.errors import ConfigError


def stored_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """`tensor`, which is or replaces `name` of `model`, as `save_pretrained` would write it.

    Returns views of `tensor` under the checkpoint's names. Raises ConfigError if the checkpoint
    holds something that is no part of `tensor`.
    """
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
    """Leaves pieces of a tensor where they are; transformers (from 5.13 on) copies each it cuts off."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor is a view of; known on the meta device too."""
    memory: int = StorageWeakRef(tensor.untyped_storage()).cdata
    return memory
