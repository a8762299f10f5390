"""Operators of a partial contract: some kinds are aligned, the others are PyTorch's own."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

from onpolicy.ops.base import Operators

OPERATORS = {
    "linear": (
        "linear",
        "partial_linear",
        "linear_gradients",
        "blockwise_linear",
        "row_parallel_linear",
    ),
    "attention": ("attention", "paged_attention"),
    "norm": ("rms_norm", "layer_norm"),
    "rotary": ("rotary",),
    "activation": ("elementwise", "gated"),
    "experts": ("grouped_linear", "grouped_partial_linear", "softmax", "topk"),
    "log_probs": ("log_softmax", "gather_log_probs", "grad_logits", "sample"),
}
"""The operators of each kind, of `onpolicy.contract.KINDS`."""


def partly_aligned(aligned: Operators, stock: Operators, kinds: Container[str]) -> Operators:
    """Those of `kinds` by `aligned`, the others by `stock`; an operator that calls another one keeps to
    its own side."""
    return cast(Operators, _PartlyAligned(aligned, stock, kinds))


def aligned_side(operators: Operators) -> Operators:
    """Of partly aligned operators the aligned ones, of all kinds; else these."""
    return cast(Operators, getattr(operators, "aligned", operators))


class _PartlyAligned:
    def __init__(self, aligned: Operators, stock: Operators, kinds: Container[str]):
        self.aligned = aligned
        for kind, names in OPERATORS.items():
            side = aligned if kind in kinds else stock
            for name in names:
                setattr(self, name, getattr(side, name))

    def __getattr__(self, name: str) -> Any:
        """Sizes, which decide no bit."""
        return getattr(self.aligned, name)
