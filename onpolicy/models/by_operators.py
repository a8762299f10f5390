"""A mode in which a model's own code calls the operators in place of PyTorch's functions.

The routers and gates of experts are a few lines in every architecture, and differ between
architectures. Their code runs unchanged, and the functions in it that are not row-invariant are
replaced by the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onpolicy.errors import ContractError
from onpolicy.ops.base import Operators

Choice = Callable[[Tensor, int], Tensor]
"""A function from a router's choice, int64 [..., k], and the number of candidates to the choice to
use."""


class ByOperators(TorchFunctionMode):
    """A mode that replaces the PyTorch functions that routers call by the operators.

    `choice` may replace the experts that the router chose (see `models/routing_replay.py`).
    """

    def __init__(self, operators: Operators, choice: Choice | None):
        super().__init__()
        self.operators, self.choice = operators, choice

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _TOPK:
            return self._topk(*args, **kwargs)
        if function in _ANSWERS:
            return _ANSWERS[function](self.operators, *args, **kwargs)
        if function in _ELEMENTWISE:
            x, *rest = args
            return self.operators.elementwise(lambda x: function(x, *rest, **kwargs), x)
        return function(*args, **kwargs)

    def _topk(
        self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the top k, always sorted, whether or not the caller asked for it."""
        _require_last("topk", input, dim)
        assert largest, "no router chooses the experts that it likes least"
        values, indices = self.operators.topk(input.reshape(-1, input.shape[-1]), k)
        values, indices = values.view(*input.shape[:-1], k), indices.view(*input.shape[:-1], k)
        if self.choice is not None:
            indices = self.choice(indices, input.shape[-1])
            values = input.gather(-1, indices)
        return torch.return_types.topk((values, indices))


@contextmanager
def watch_choices() -> Iterator[list[int]]:
    """Yield a list that collects the number of candidates of each top-k call inside."""
    candidates: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in _TOPK:
                candidates.append(args[0].shape[-1])
            return function(*args, **(kwargs or {}))

    with Watch():
        yield candidates


def _linear(
    operators: Operators, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return operators.linear(input, weight, bias)


def _softmax(
    operators: Operators,
    input: Tensor,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
    _stacklevel: int = 0,
) -> Tensor:
    _require_last("softmax", input, dim)
    return operators.softmax(input).to(dtype or input.dtype)


def _require_last(name: str, input: Tensor, dim: int) -> None:
    if dim not in (-1, input.dim() - 1):
        raise ContractError(
            f"operator={name}, dim={dim}, shape={tuple(input.shape)}: a router works along another "
            "axis than the last, for which there is no aligned operator. Run without "
            "--true-on-policy-mode."
        )


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((F.softmax, torch.softmax, Tensor.softmax), _softmax),
}
_TOPK = {torch.topk, Tensor.topk}
_ELEMENTWISE = {F.silu, F.gelu, torch.sigmoid, Tensor.sigmoid}
