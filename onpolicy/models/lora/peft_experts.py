"""Adapters of a mixture's experts in the format of PEFT, which adapts parameters of their module.

PEFT wraps the module that holds a layer's experts twice, for gate_up_proj and around that for down_proj.
A is [E r, in] there, and B [out, r E], whose columns go through the experts first.
Source: `ParamWrapper` and `_inject_parameters` of the package peft (0.21).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from onpolicy.models.experts import expert_sizes
from onpolicy.models.lora.peft_adapter import NESTED

_IN_MODEL = {"gate_up": "gate_up_proj", "down": "down_proj"}

FUSED_NAMES = {"gate_proj", "up_proj", "down_proj"}
"""Linears whose names PEFT reads, in a mixture, as those of the experts that were modules in
transformers 4 (its `_convert_peft_config_moe`), wherever they are. So their weights are named there."""


def of_experts(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """...mlp.experts.lora.down.A -> ...mlp.experts.lora.A, and its numbers in PEFT's order; None for the
    adapter of a linear."""
    module, _, factor = name.rpartition(".lora.")
    pair, _, factor = factor.partition(".")
    if pair not in _IN_MODEL:
        return None
    nested = NESTED if pair == "gate_up" else ""
    if factor == "A":
        in_peft = tensor.flatten(0, 1)
    else:
        in_peft = tensor.flatten(1, -2).permute(1, 2, 0).flatten(1)
    return f"{module}{nested}.lora.{factor}", in_peft


def from_peft(module: str, factor: str, tensor: Tensor, rank: int) -> tuple[str, Tensor]:
    """The inverse of `of_experts`: a wrapper of experts, "A" or "B", and its numbers -> ours."""
    pair = "gate_up" if module.endswith(NESTED) else "down"
    if factor == "A":
        here = tensor.unflatten(0, (-1, rank))
    else:
        here = tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
        here = here.unflatten(1, (2, -1)) if pair == "gate_up" else here
    return f"{module.removesuffix(NESTED)}.lora.{pair}.{factor}", here


def parameter_of(pair: str) -> str:
    """...experts.lora.down, a pair of factors -> ...experts.down_proj, what it is beside; of a linear,
    ...up_proj.lora -> ...up_proj.weight."""
    module, _, part = pair.rpartition(".lora.")
    return (
        f"{module}.{_IN_MODEL[part]}"
        if part in _IN_MODEL
        else f"{pair.removesuffix('.lora')}.weight"
    )


def peft_shapes(name: str, experts: Any, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes that the factors of a module of experts have in a file, by wrapper and factor."""
    count, inner, hidden = expert_sizes(experts)
    shapes: dict[str, tuple[int, ...]] = {}
    for wrapper, rows, columns in ((f"{name}{NESTED}", 2 * inner, hidden), (name, hidden, inner)):
        shapes[f"{wrapper}.lora.A"] = (count * rank, columns)
        shapes[f"{wrapper}.lora.B"] = (rows, rank * count)
    return shapes


def peft_targets(targets: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """What `adapter_config.json` calls the targets of adapters of these names."""
    split = [name.rpartition(".lora.") for name in names]
    experts = {
        m.rpartition(".")[2] for m, _, factor in split if factor.partition(".")[0] in _IN_MODEL
    }
    if not experts:
        return {"target_modules": list(targets)}
    as_weights = FUSED_NAMES.intersection(targets)
    parameters = [f"{leaf}.{part}" for leaf in sorted(experts) for part in _IN_MODEL.values()]
    return {
        "target_modules": [leaf for leaf in targets if leaf not in experts | as_weights],
        "target_parameters": parameters + [f"{leaf}.weight" for leaf in sorted(as_weights)],
    }
