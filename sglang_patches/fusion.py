"""Fusion of the engine's kernels into fewer and larger ones, to the bits of the trainer's separate
ones.

Projections of one input become one product, and norms are fused with adjacent operations: see
onpolicy/models/joint_linears.py and fused_norms.py, which test on this machine that no bit changes.
Joint weights lie in the memory that SGLang keeps weights in and releases while a trainer on the
same GPU computes, and the engine still computes with them after every push.

Source: load_model_with_memory_saver (sglang/srt/model_executor), replace_linear_class
(sglang/srt/models/transformers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from onpolicy.models.fused_norms import fuse_norms
from onpolicy.models.joint_linears import JointLinear, join_linears
from onpolicy.ops import Operators
from sglang_patches import registry


def fuse(runner: Any, operators: Operators) -> list[JointLinear]:
    """Fuse the modules of an engine's model runner after they are aligned; return the joint
    products."""
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
