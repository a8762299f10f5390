"""Fewer and larger kernels in a step of the engine, to the bits of the trainer's separate ones.

Projections of one input become one product, and norms are computed with what stands beside them: see
onpolicy/models/joint_linears.py and fused_norms.py, which try on this machine that no bit changes. Joint
weights lie in the memory that SGLang keeps weights in and gives back while a trainer on the same GPU
computes, and after every push they are still what the engine computes with.
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
    """Fuse what an engine's model runner has loaded, once its modules are aligned; returns the joint
    products."""
    with weights_memory(runner):
        joint = join_linears(runner.model, operators, is_plain)
    fused = fuse_norms(runner.model, operators)
    runner.model.load_weights = _checked(runner.model.load_weights, joint)
    registry.report["fusion"] = {"joint_linears": len(joint), "fused_norms": fused}
    return joint


def weights_memory(runner: Any) -> AbstractContextManager[None]:
    """What is made inside lies where SGLang keeps weights."""
    backup = runner.server_args.enable_weights_cpu_backup
    memory: AbstractContextManager[None] = runner.memory_saver_adapter.region(
        "weights", enable_cpu_backup=backup
    )
    return memory


def is_plain(linear: Any) -> bool:
    """Whether a linear of SGLang's computes `Operators.linear` of its input, and asks no other rank."""
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
