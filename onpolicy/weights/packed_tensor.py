"""A weight in memory as codes and scales, and a tensor all the same: who computes with it gets numbers.

FSDP2 gathers the bytes of all ranks, and has them unpacked where it would gather numbers, for as long as
a layer computes. Nothing can be written into it but what is packed.
Source: fsdp_pre_all_gather, fsdp_post_all_gather (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from onpolicy.weights.packing import PackedWeight, bits_of, encode, unpack
from onpolicy.weights.rounding import FORMATS, quantise

_aten = torch.ops.aten


class PackedTensor(Tensor):
    """[..., K], in its dtype what codes and scales come to; matrices stand one below the other."""

    held: Tensor
    """uint8 [groups, bytes]: of rows that share scales, first the codes, then the scales."""

    weight_format: str

    @staticmethod
    def __new__(
        cls, held: Tensor, weight_format: str, shape: Sequence[int], dtype: torch.dtype
    ) -> PackedTensor:
        made: PackedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=held.device
        )
        made.held, made.weight_format = held, weight_format
        return made

    @staticmethod
    def empty_like(tensor: Tensor, weight_format: str) -> PackedTensor:
        """One that is to take the place of `tensor`; it holds anything."""
        size = group_size(weight_format, tensor.shape[-1])
        groups = tensor.numel() // tensor.shape[-1] // FORMATS[weight_format].block[0]
        held = tensor.new_empty((groups, size), dtype=torch.uint8)
        return PackedTensor(held, weight_format, tensor.shape, tensor.dtype)

    def unpacked(self) -> Tensor:
        """Its numbers, in memory of their own."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        unpack_groups(self.held, self.weight_format, whole)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, own = kwargs or {}, args[0]
        if func is _aten.detach.default:
            return cls(own.held, own.weight_format, own.shape, own.dtype)
        if func is _aten.view.default and [*args[1]] in ([-1], [*own.shape]):  # as FSDP2 keeps it
            shape = own.shape if len(args[1]) > 1 else (own.numel(),)
            return cls(own.held, own.weight_format, shape, own.dtype)
        if func is _aten.empty_like.default:
            device = kwargs.get("device")
            held = torch.empty_like(own.held, device=device)
            return cls(held, own.weight_format, own.shape, own.dtype)
        if func._schema.is_mutable:
            raise TypeError(f"{func}: a packed weight is not written into")
        args, kwargs = tree_map_only(cls, cls.unpacked, (args, kwargs))
        return func(*args, **kwargs)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], torch.Size]:
        """What each rank gives, and what is to be known of the whole."""
        return (self.held,), outer_size

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor],
        size: torch.Size,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The whole weight; `out`: where it was the last time."""
        (held,) = gathered
        whole = (
            torch.empty(size, dtype=param_dtype, device=held.device) if out is None else out.data
        )
        unpack_groups(held, self.weight_format, whole)
        return (whole, (whole,)) if out is None else None


def pack_groups(weight: Tensor, weight_format: str) -> Tensor:
    """[N, K] -> uint8 [groups, bytes], of which `unpack_groups` makes what `round_weight` does of the
    weight. N is a multiple of the rows that share scales."""
    numbers, scale = quantise(weight, weight_format)
    codes = encode(numbers, weight_format).view(len(scale), -1)
    return torch.cat([codes, scale.contiguous().view(torch.uint8)], 1)


def unpack_groups(held: Tensor, weight_format: str, out: Tensor) -> None:
    """Write the weight, or several, into `out` [..., K]."""
    rows = out.view(-1, out.shape[-1])
    width = _code_bytes(weight_format, rows.shape[1])
    split = FORMATS[weight_format].block[0] * width
    scale = held[:, split:].contiguous().view(torch.float32)
    unpack(PackedWeight(held[:, :split].reshape(-1, width), scale), weight_format, rows)


def group_size(weight_format: str, columns: int) -> int:
    """Bytes of the rows that share scales."""
    high, wide = FORMATS[weight_format].block
    return high * _code_bytes(weight_format, columns) + 4 * -(-columns // (wide or columns))


def _code_bytes(weight_format: str, columns: int) -> int:
    return -(-columns * bits_of(weight_format) // 8)


def memory_of(tensor: Tensor) -> Tensor:
    """What this process holds of it, in the form in which it lies in memory."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.held if isinstance(own, PackedTensor) else own
