"""Fusion of the engine's kernels without a change of bits, and bytes kept for FP8 products.

Stock SGLang fuses in its own model definitions, by other kernels. Here projections of one input
become one product, and norms are fused with adjacent operations, by
onpolicy/models/fused_layers.py, which tests on this machine that the bits are the trainer's. Needed
as long as the engine runs the trainer's modules, which are separate.

Stock SGLang loads bytes and scales. Here rounded weights are pushed and verified, and bytes and
scales follow from them. They are made once after a push, before the first forward pass, in place,
where CUDA graphs read them. They and joint weights lie in the memory that SGLang keeps weights in
and releases while a trainer on the same GPU computes; the engine still computes with joint weights
after every push.

Source: load_model_with_memory_saver and ModelRunner.forward (sglang/srt/model_executor),
replace_linear_class (sglang/srt/models/transformers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from torch import Tensor

from onpolicy.models.fused_layers import JointLinear, fuse_norms, join_linears
from onpolicy.models.rounded_inputs import reads_rounded
from onpolicy.ops import Operators
from onpolicy.ops.row_parallel import WHOLE, RowParallel
from sglang_patches import registry


def fuse(runner: Any, operators: Operators) -> list[JointLinear]:
    """Fuse the aligned modules of an engine's model runner; return the joint products."""
    with weights_memory(runner):
        joint = join_linears(runner.model, operators, is_plain)
    fused = fuse_norms(runner.model, operators)
    runner.model.load_weights = _checked(runner.model.load_weights, joint)
    registry.report["fusion"] = {"joint_linears": len(joint), "fused_norms": fused}
    return joint


def weights_memory(runner: Any) -> AbstractContextManager[None]:
    """Return a context whose allocations lie where SGLang keeps weights."""
    backup = runner.server_args.enable_weights_cpu_backup
    memory: AbstractContextManager[None] = runner.memory_saver_adapter.region(
        "weights", enable_cpu_backup=backup
    )
    return memory


def is_plain(linear: Any) -> bool:
    """Return whether an SGLang linear computes plain `Operators.linear`, without other ranks."""
    from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear

    is_one = getattr(linear, "parent_cls", None) in (ColumnParallelLinear, ReplicatedLinear)
    return is_one and not getattr(linear, "gather_output", False)


def _checked(load_weights: Callable[..., Any], joint: list[JointLinear]) -> Callable[..., Any]:
    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = load_weights(*args, **kwargs)
        for linear in joint:
            linear.require_joint()
        return loaded

    return load


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
    """Yield the matrices that multiply rounded inputs: each block of a row-parallel one alone."""
    yield from (each.weight for each in joint if reads_rounded(each.linears[0]))
    joined = set(chain.from_iterable(each.linears for each in joint))
    for module in model.modules():
        if reads_rounded(module) and module not in joined:
            row_parallel: RowParallel = getattr(module, "row_parallel", WHOLE)
            yield from row_parallel.split(module.weight)
