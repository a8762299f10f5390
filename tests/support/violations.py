"""Operators that break their promise by construction: what negative controls must find, on every CPU.

How a library's own kernels round is an accident of the machine (docs/bitwise_parity.md records some).
A violation here is the smallest there is: the next larger number, whenever few rows share a call.
"""

import torch
from torch import Tensor

from onpolicy.ops.cpu import CpuOperators

FEW = 16
"""Rows; fewer of them are computed otherwise, as matrix-vector kernels do."""

ROW_OPERATORS = (
    "linear", "partial_linear", "grouped_linear", "grouped_partial_linear", "attention",
    "paged_attention", "rms_norm", "layer_norm", "elementwise", "gated", "add_scaled", "rotary",
    "softmax", "topk", "log_softmax", "gather_log_probs", "sample", "causal_conv", "gated_delta",
)  # fmt: skip
"""All that a rollout computes with, and `gather_log_probs`, a trainer's `log_softmax`."""


def next_up(x):
    """Every element's successor, one unit in the last place away."""
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def few(rows):
    return rows < FEW


def always(rows):
    return True


def break_operator(operators, name, when=few):
    """Let the operator `name` of `operators` round up for such numbers of rows."""
    right = getattr(operators, name)

    def broken(*args, **kwargs):
        out = right(*args, **kwargs)
        return _next(out) if when(_rows(name, _first_tensor(args))) else out

    setattr(operators, name, broken)
    return operators


def _next(out):
    """The next larger number; of numbers that count something, such as tokens, the next one."""
    if isinstance(out, tuple):
        return tuple(map(_next, out))
    return next_up(out) if out.is_floating_point() else out + 1


def break_gradient(operators, name):
    """Let the gradient of the first tensor of the operator `name` round up when it has few rows."""
    right = getattr(operators, name)

    def broken(*args, **kwargs):
        x = _first_tensor(args)
        if not (x.requires_grad and few(_rows(name, x))):
            return right(*args, **kwargs)
        watched = x.view_as(x)
        watched.register_hook(next_up)
        return right(*(watched if a is x else a for a in args), **kwargs)

    setattr(operators, name, broken)
    return operators


def few_rows_differ():
    """The CPU operators, all of them broken; and parts of a sum are rounded to the dtype of `x`."""
    operators = CpuOperators()
    partial = operators.partial_linear
    operators.partial_linear = lambda x, weight: partial(x, weight).to(x.dtype).float()
    for name in ROW_OPERATORS:
        break_operator(operators, name)
    return operators


def _first_tensor(args):
    return next(argument for argument in args if isinstance(argument, Tensor))


def _rows(name, x):
    if name in ("attention", "paged_attention", "gated_delta"):
        return len(x)
    return x.shape[-2] if name == "rotary" else x.shape[:-1].numel()
