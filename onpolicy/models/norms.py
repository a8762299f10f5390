"""Norms computed by the aligned operators, in any Hugging Face model.

A norm is recognised by what it computes: on a probe in bfloat16 it gives exactly the bits of one of
the formulas below. They differ in where they round: Llama's rounds before it multiplies with the
weight; OLMo-2's and GPT-OSS's round after; Gemma's rounds after too, and its weight is an offset
from one. So is the weight of Nemotron's layer norm. Gemma-4's norm of values has no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onpolicy.ops.base import Operators
from onpolicy.ops.checks.fixed_numbers import probe

EPSILONS = (1e-5, 1e-6)
"""Values of epsilon to try for a norm that has no such attribute (OLMo's)."""

RMS_FORMS = ((0.0, False), (0.0, True), (1.0, True))
"""Forms of an RMS norm with a weight: (offset of the weight, whether only the product is rounded)."""

ANY_SIZE = 48
"""Size to try for a norm that has no size of its own."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """The formula of a norm."""

    is_centered: bool
    """Whether it is a layer norm, which subtracts the mean; otherwise it is an RMS norm."""

    eps: float

    offset: float = 0.0
    """Offset added to the weight: in float32 for an RMS norm, in the weight's dtype for a layer
    norm."""

    round_last: bool = True
    """Whether an RMS norm rounds only the product with the weight; see `Operators.rms_norm`."""


class AlignedRMSNorm(nn.Module):
    """RMS norm by `Operators.rms_norm`, with the weight, if any, of the module that it replaces."""

    def __init__(self, norm: Any, kind: NormKind, operators: Operators):
        super().__init__()
        self.weight: nn.Parameter | None = getattr(norm, "weight", None)
        self.kind, self.operators = kind, operators

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            weight = torch.ones(x.shape[-1], device=x.device)
            return self.operators.rms_norm(x, weight, self.kind.eps, round_last=True)
        return self.operators.rms_norm(x, self.scale, self.kind.eps, self.kind.round_last)

    @property
    def scale(self) -> Tensor:
        """Return the factor of the operator: the weight, plus its offset if there is one."""
        assert self.weight is not None
        return self.kind.offset + self.weight.float() if self.kind.offset else self.weight


class AlignedLayerNorm(nn.Module):
    """Layer norm by `Operators.layer_norm`, with the parameters of the module that it replaces."""

    def __init__(self, norm: Any, kind: NormKind, operators: Operators):
        super().__init__()
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        self.kind, self.operators = kind, operators

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor | None = self.weight
        if weight is not None and self.kind.offset:
            weight = weight + self.kind.offset
        return self.operators.layer_norm(x, weight, self.bias, self.kind.eps)


def aligned_norm(module: nn.Module, operators: Operators) -> nn.Module | None:
    """Return the replacement of `module`, if it is a norm of a known kind."""
    kind = norm_kind(module)
    if kind is None:
        return None
    return (AlignedLayerNorm if kind.is_centered else AlignedRMSNorm)(module, kind, operators)


def is_norm(module: nn.Module) -> bool:
    """Return whether the module's class name contains "Norm"."""
    return "Norm" in type(module).__name__


def norm_size(module: Any) -> int | None:
    """Return the size of the last axis; None if the module does not say it."""
    weight = getattr(module, "weight", None)
    if weight is not None:
        return int(weight.shape[-1])
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if shape else None


def norm_kinds(model: nn.Module) -> dict[nn.Module, NormKind]:
    """Return the norms of a model whose kind is known."""
    kinds = ((module, norm_kind(module)) for module in model.modules())
    return {module: kind for module, kind in kinds if kind is not None}


def norm_kind(module: Any) -> NormKind | None:
    """Return the kind of `module`, if it is a norm over the last axis by one of the known formulas."""
    parameters = dict(module.named_parameters(recurse=False))
    known = is_norm(module) and not isinstance(module, (AlignedRMSNorm, AlignedLayerNorm))
    if not known or parameters.keys() - {"weight", "bias"} or list(module.children()):
        return None
    size = norm_size(module) or ANY_SIZE
    if any(parameter.shape != (size,) for parameter in parameters.values()):
        return None
    x = probe(3, size, seed=1).bfloat16()
    values = {n: probe(size, seed=2 + len(n)).bfloat16() for n in parameters}
    try:
        got = torch.func.functional_call(module, values, (x,))
    except Exception:  # the module may take other arguments
        return None
    for kind, formula in _candidates(module):
        if torch.equal(got, formula(x, values.get("weight"), values.get("bias"), kind)):
            return kind
    return None


def _candidates(module: Any) -> Iterator[tuple[NormKind, Callable[..., Tensor]]]:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    for each in EPSILONS if eps is None else (eps,):
        has_weight = getattr(module, "weight", None) is not None
        for offset, round_last in RMS_FORMS if has_weight else ((0.0, True),):
            yield NormKind(False, each, offset, round_last), _rms_norm
        yield NormKind(False, each), _rms_norm_by_power
        yield NormKind(True, each), _layer_norm
        yield NormKind(True, each), _layer_norm_of_torch
        yield NormKind(True, each, offset=1.0), _layer_norm_of_torch


def _rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind) -> Tensor:
    rows = x.float()
    return _weighted(rows * torch.rsqrt(_mean_square(rows, kind)), weight, x.dtype, kind)


def _rms_norm_by_power(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind
) -> Tensor:
    """Compute the RMS norm with Gemma-4's power function, mathematically the same formula."""
    rows = x.float()
    return _weighted(rows * torch.pow(_mean_square(rows, kind), -0.5), weight, x.dtype, kind)


def _mean_square(rows: Tensor, kind: NormKind) -> Tensor:
    return rows.pow(2).mean(-1, keepdim=True) + kind.eps


def _weighted(rows: Tensor, weight: Tensor | None, dtype: torch.dtype, kind: NormKind) -> Tensor:
    if weight is None:
        return rows.to(dtype)
    if kind.round_last:
        return ((kind.offset + weight.float()) * rows).to(dtype)
    return weight * rows.to(dtype)


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind) -> Tensor:
    rows = x.float() - x.float().mean(-1, keepdim=True)
    rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + kind.eps)
    rows = rows if weight is None else weight.float() * rows
    return (rows if bias is None else rows + bias.float()).to(x.dtype)


def _layer_norm_of_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: NormKind
) -> Tensor:
    """Compute PyTorch's layer norm, with another order of sums and with Nemotron's offset."""
    weight = weight + kind.offset if weight is not None and kind.offset else weight
    weight, bias = (None if p is None else p.float() for p in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, kind.eps).to(x.dtype)
