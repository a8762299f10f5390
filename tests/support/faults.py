"""Faults to build into one operator of one module: each gives other bits, on every CPU.

`make(right)` is what `right`, an operator, becomes.
"""

import torch
from torch import Tensor

from tests.support.violations import next_up


def one_ulp_in_three_rows(right):
    """Three numbers of a call's are the next larger ones, a quarter of them apart."""

    def broken(*args, **kwargs):
        out = right(*args, **kwargs)
        first = (out[0] if isinstance(out, tuple) else out).contiguous().clone()
        where = first.numel() * torch.arange(1, 4) // 4
        first.view(-1)[where] = next_up(first.view(-1)[where])
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return broken


def one_ulp_everywhere(right):
    def broken(*args, **kwargs):
        out = right(*args, **kwargs)
        return (next_up(out[0]), *out[1:]) if isinstance(out, tuple) else next_up(out)

    return broken


def one_ulp_in_the_last_column(right):
    """Of every row of a call."""

    def broken(*args, **kwargs):
        out = right(*args, **kwargs).clone()
        out[..., -1] = next_up(out[..., -1])
        return out

    return broken


def rounded_in_between(right):
    def broken(*args, **kwargs):
        given = [a.bfloat16().to(a.dtype) if _is_float(a) else a for a in args]
        return right(*given, **kwargs)

    return broken


def summed_in_other_blocks(right):
    """A linear's sum over K in blocks of 7, added up in float32."""

    def broken(x, weight, *rest):
        pairs = zip(x.float().split(7, -1), weight.float().split(7, -1), strict=True)
        parts = [a @ b.T for a, b in pairs]
        return torch.stack(parts).cumsum(0)[-1].to(x.dtype)

    return broken


def summed_backwards(right):
    """A norm's sum in the opposite order, in steps of one."""

    def broken(x, weight, eps, *rest):
        squares = x.float().pow(2).flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]
        return weight * (x.float() * torch.rsqrt(squares + eps)).to(x.dtype)

    return broken


def other_experts(right):
    """A row in the middle of a call goes to the experts after its own."""

    def broken(x, k):
        values, indices = right(x, k)
        indices = indices.clone()
        indices[len(x) // 2] = (indices[len(x) // 2] + 1) % x.shape[-1]
        return values, indices

    return broken


def _is_float(x):
    return isinstance(x, Tensor) and x.is_floating_point()
