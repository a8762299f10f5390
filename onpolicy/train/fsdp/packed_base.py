"""What is not trained, rounded and kept as codes and scales: the base that adapters are beside.

Each rank has its rows, as FSDP2 shares them. A whole parameter is rounded while it is loaded, so that
nothing but one is in memory as it will be computed with.
Source: Dettmers et al., QLoRA (arXiv 2305.14314), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from onpolicy.errors import ConfigError
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.models.policy import PolicyModel
from onpolicy.models.stored import stored_tensors
from onpolicy.train import distributed
from onpolicy.weights.packed_tensor import PackedTensor, pack_groups
from onpolicy.weights.rounding import FORMATS, is_rounded


def is_packed(tensor: Tensor) -> bool:
    """Whether a parameter is kept as codes and scales."""
    return isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, PackedTensor)


def keep_packed(model: PolicyModel, weight_format: str) -> None:
    """Let those parameters of a sharded model without numbers be packed ones that are not trained and
    that the format is for.

    Raises ConfigError for one whose rows the ranks cannot share so.
    """
    for name, parameter in model.causal_lm.named_parameters():
        if parameter.requires_grad or is_adapters(name):
            continue
        parts = stored_tensors(model.causal_lm, name, torch.empty(parameter.shape, device="meta"))
        if not any(is_rounded(key, part) for key, part in parts.items()):
            continue
        _require_rows(name, parameter, parts, FORMATS[weight_format].block[0])
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = PackedTensor.empty_like(parameter._local_tensor, weight_format)


def _require_rows(name: str, whole: Tensor, parts: Mapping[str, Tensor], high: int) -> None:
    """`high`: rows that share scales."""
    ranks, matrices = distributed.world_size(), sorted(parts.values(), key=Tensor.storage_offset)
    own, left = divmod(len(whole), ranks)
    rows = own * whole[0].numel() // whole.shape[-1]
    if left or rows % high or any(len(part) % high for part in matrices):
        raise ConfigError(
            f"--train-pack-weights: {name} has {len(whole)} rows or experts on ranks={ranks}, and each "
            f"rank packs as many, in blocks of {high} rows. Choose a number of ranks that divides it, "
            "or leave the flag out."
        )
    ends = [part.storage_offset() + part.numel() for part in matrices]
    are_whole = all(is_rounded(key, part) and part.is_contiguous() for key, part in parts.items())
    if not are_whole or [0, *ends[:-1]] != [part.storage_offset() for part in matrices]:
        raise ConfigError(
            f"--train-pack-weights: {name} is not made of a checkpoint's matrices, one below the other. "
            "Leave the flag out."
        )


def pack_rows(parameter: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Round and pack a parameter's matrices as a checkpoint has them, and keep this rank's rows."""
    assert isinstance(parameter, DTensor)
    own = parameter._local_tensor
    assert isinstance(own, PackedTensor)
    _, (first, *_) = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    columns, high = parameter.shape[-1], FORMATS[own.weight_format].block[0]
    start = first * parameter[0].numel() // columns // high
    place = 0
    for part in sorted(parts.values(), key=Tensor.storage_offset):
        end = place + len(part) // high
        ours = slice(max(place, start), min(end, start + len(own.held)))
        if ours.start < ours.stop:
            groups = pack_groups(part, own.weight_format)
            own.held[ours.start - start : ours.stop - start].copy_(
                groups[ours.start - place : ours.stop - place]
            )
        place = end
