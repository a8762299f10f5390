"""Operators of a partial contract: some kinds are aligned, everywhere or in some decoder layers; all
else is PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, cast

from onpolicy.contract import OUTSIDE
from onpolicy.ops.base import Operators

OPERATORS = {
    "linear": (
        "linear",
        "partial_linear",
        "linear_gradients",
        "blockwise_linear",
        "row_parallel_linear",
        "add_scaled",
    ),
    "attention": ("attention", "paged_attention"),
    "norm": ("rms_norm", "layer_norm"),
    "rotary": ("rotary",),
    "activation": ("elementwise", "gated"),
    "experts": ("grouped_linear", "grouped_partial_linear", "mix_few", "softmax", "topk"),
    "log_probs": ("log_softmax", "gather_log_probs", "grad_logits", "sample", "uniform"),
}
"""The operators of each kind, of `onpolicy.contract.KINDS`."""


class RunningLayer:
    """Says of the layer that a model is in whether operators are aligned there."""

    def __init__(self, layers: Container[str]):
        """layers: those in which they are; see `NumericsContract.layers`."""
        self._layers = layers
        self.enter(OUTSIDE)

    def enter(self, layer: str) -> None:
        """The model goes on in this layer, or OUTSIDE of all."""
        self.is_aligned = layer in self._layers

    def choose(self, aligned: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is one of these, by the layer in which it is called."""
        return lambda *args, **kwargs: (aligned if self.is_aligned else own)(*args, **kwargs)


def partly_aligned(
    aligned: Operators, stock: Operators, kinds: Container[str], layers: Container[str] = ()
) -> Operators:
    """Those of `kinds` by `aligned`, the others by `stock`; an operator that calls another one keeps to
    its own side. With `layers` by `aligned` in those layers alone: a model that computes with them must
    be followed (`onpolicy.models.layers.follow_layers`)."""
    return cast(Operators, _PartlyAligned(aligned, stock, kinds, layers))


def running_layer(operators: Operators) -> RunningLayer | None:
    """What operators that are aligned in some layers alone must be told; None of all others."""
    return getattr(operators, "running_layer", None)


def aligned_side(operators: Operators) -> Operators:
    """The aligned operators of all kinds, where `operators` are partly aligned; else `operators`."""
    return cast(Operators, getattr(operators, "aligned", operators))


class _PartlyAligned:
    def __init__(
        self, aligned: Operators, stock: Operators, kinds: Container[str], layers: Container[str]
    ):
        self.aligned = aligned
        self.running_layer = RunningLayer(layers) if layers else None
        for kind, names in OPERATORS.items():
            for name in names:
                ours, own = getattr(aligned, name), getattr(stock, name)
                if self.running_layer is not None:
                    ours = self.running_layer.choose(ours, own)
                setattr(self, name, ours if kind in kinds else own)

    def __getattr__(self, name: str) -> Any:
        """Sizes, which decide no bit."""
        return getattr(self.aligned, name)
