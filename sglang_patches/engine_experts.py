"""Hugging Face experts in the model that SGLang runs, and their loading.

SGLang's transformers backend swaps the experts of every layer for its own fused ones. Here they
stay, so that `onpolicy.models.align` gives both engines the same. Their parameters are filled with
the checkpoint's tensors, one per expert and matrix, as transformers itself would. With tensor
parallelism every rank holds its part of the intermediate axis of all experts.

Source: sglang/srt/models/transformers.py. Can go when the backend lets a caller keep HF modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from onpolicy.models.expert_layers import expert_blocks, expert_sizes, has_usual_experts, routers_of
from onpolicy.models.llama4 import use_usual_form
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.models.stored import stored_tensors
from sglang_patches import registry
from sglang_patches.engine_ranks import rank, shard

REPLACE_TARGET = "sglang.srt.models.transformers.MoEMixin.recursive_replace"
LOAD_TARGET = "sglang.srt.models.transformers.TransformersBase.load_weights"
PREFIX = "model."


class Destinations(NamedTuple):
    """The parameters for a checkpoint's tensors, by the checkpoint's names."""

    names: dict[str, str]
    """The names of parameters that are whole tensors of a checkpoint."""

    parts: dict[str, torch.Tensor]
    """The slices of parameters that hold several tensors of a checkpoint."""

    held: dict[str, torch.Tensor]
    """The tensors in both, by the checkpoint's names."""


_Places = list[tuple[int, int]]

_known: WeakKeyDictionary[PreTrainedModel, tuple[_Places, Destinations]] = WeakKeyDictionary()


def install() -> None:
    registry.hook(REPLACE_TARGET, _replace_all_but_experts, "replace")
    registry.hook(LOAD_TARGET, _load, "around")


def _replace_all_but_experts(model: Any) -> None:
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.models.transformers import TransformersBase

    use_usual_form(model.model)
    with _out_of_sight(model.model):
        TransformersBase.recursive_replace(model)
    for module in model.model.modules():
        if has_usual_experts(module):
            _keep_part(module, get_tp_group().world_size)


@contextmanager
def _out_of_sight(model: nn.Module) -> Iterator[None]:
    """Hide linear routers while SGLang replaces linears: it would make them plain ones."""
    hidden = [
        (block, name, router)
        for block in expert_blocks(model)
        for name, router in block.named_children()
        if isinstance(router, nn.Linear) and router in routers_of(block)
    ]
    for block, name, _ in hidden:
        setattr(block, name, None)
    try:
        yield
    finally:
        for block, name, router in hidden:
            setattr(block, name, router)


def _keep_part(experts: Any, ranks: int) -> None:
    """Resize the parameters to one of `ranks` parts, laid out as the operators read it."""
    num_experts, intermediate, hidden = expert_sizes(experts)
    part = intermediate // ranks
    sizes = {
        "gate_up_proj": (num_experts, 2 * part, hidden),
        "down_proj": (num_experts, hidden, part),
        "gate_up_proj_bias": (num_experts, 2 * part),
    }
    for name in sizes.keys() & dict(experts.named_parameters(recurse=False)).keys():
        tensor = getattr(experts, name).new_empty(sizes[name])
        is_turned = experts.is_transposed and tensor.dim() == 3
        setattr(experts, name, nn.Parameter(tensor.transpose(1, 2) if is_turned else tensor))


def _load(
    original: Any,
    model: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    names, parts, _ = _destinations(model.model)

    def others() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name in parts:
                parts[name].copy_(shard(tensor, parts[name], rank()).view_as(parts[name]))
            else:
                yield names.get(name, name), tensor

    return original(model, others(), *args, **kwargs)


def held_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a Hugging Face model inside SGLang, if it is one, by their names."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, PreTrainedModel):
        return {}
    return _destinations(inner).held


def _destinations(model: PreTrainedModel) -> Destinations:
    """Return the destinations of a model's tensors, cached: slicing all experts takes a second."""
    places = _places(model)
    known = _known.get(model)
    if known is None or known[0] != places:
        known = _known[model] = (places, _cut_out(model))
    return known[1]


def _places(model: nn.Module) -> _Places:
    """Return the id and address of every parameter and buffer; faster than `state_dict`."""
    places, modules = [], [model]
    while modules:
        module = modules.pop()
        modules += filter(None, module._modules.values())
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                places.append((id(tensor), tensor.data_ptr()))
    return places


def _cut_out(model: PreTrainedModel) -> Destinations:
    names: dict[str, str] = {}
    parts: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        stored = {name: tensor} if is_adapters(name) else stored_tensors(model, name, tensor)
        for key, part in stored.items():
            held[PREFIX + key] = part
            if part is tensor:
                names[PREFIX + key] = PREFIX + name
            else:
                parts[PREFIX + key] = part
    return Destinations(names, parts, held)
