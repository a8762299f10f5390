"""Bytes that linears multiply, kept beside the rounded weights they are made from.

Diverges in stock SGLang: it loads bytes and scales. Here rounded weights are pushed and verified,
and bytes and scales follow from them. They are made once after a push, before the first forward
pass, in place, where CUDA graphs read them; and they lie in the memory that SGLang keeps weights
in, and are released with it.

Source: ModelRunner.forward, sglang/srt/model_executor/model_runner.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from onpolicy.models.joint_linears import JointLinear
from onpolicy.models.rounded_inputs import reads_rounded
from onpolicy.ops import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from sglang_patches import registry
from sglang_patches.fusion import weights_memory

FORWARD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


class HeldBytes:
    """The bytes of one model runner."""

    def __init__(self, operators: Operators):
        self._operators = operators.of_rounded
        self._weights: list[Tensor] = []
        self._is_old = False
        registry.hook(FORWARD_TARGET, self._renew, "before")

    def take(self, runner: Any, joint: list[JointLinear]) -> None:
        """Make the bytes of the loaded weights, and again after every later load."""
        self._weights = list(multiplied(runner.model, joint))
        with weights_memory(runner):
            self._operators.hold(self._weights)
        runner.model.load_weights = self._noticed(runner.model.load_weights)

    def _noticed(self, load_weights: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            self._is_old = True
            return load_weights(*args, **kwargs)

        return load

    def _renew(self, *_: Any, **__: Any) -> None:
        if self._is_old:
            self._operators.hold(self._weights)
            self._is_old = False


def multiplied(model: Any, joint: list[JointLinear]) -> Iterator[Tensor]:
    """Yield the matrices by which `model`'s linears multiply rounded inputs: each block of a
    row-parallel one separately."""
    yield from (each.weight for each in joint if reads_rounded(each.linears[0]))
    joined = set(chain.from_iterable(each.linears for each in joint))
    for module in model.modules():
        if reads_rounded(module) and module not in joined:
            row_parallel: RowParallel = getattr(module, "row_parallel", WHOLE)
            yield from row_parallel.split(module.weight)
