"""Adapters of experts in PEFT's format, which adapts the parameters of the experts' module.

PEFT wraps the module that holds a layer's experts twice: for gate_up_proj, and around that for
down_proj. Its A is [E r, in], and its B [out, r E], whose columns vary fastest over the experts.
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
"""Names of linears that PEFT, in a mixture, takes for the experts' modules of transformers 4
(`_convert_peft_config_moe`), wherever they are. So the weights of such linears are named
instead."""


def of_experts(name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """Map ...mlp.experts.lora.down.A to ...mlp.experts.lora.A, with its values in PEFT's order.

    Return None for the adapter of a linear.
    """
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
    """Map a wrapper of experts, "A" or "B", and its values to ours: the inverse of `of_experts`."""
    pair = "gate_up" if module.endswith(NESTED) else "down"
    if factor == "A":
        here = tensor.unflatten(0, (-1, rank))
    else:
        here = tensor.unflatten(1, (rank, -1)).permute(2, 0, 1)
        here = here.unflatten(1, (2, -1)) if pair == "gate_up" else here
    return f"{module.removesuffix(NESTED)}.lora.{pair}.{factor}", here


def parameter_of(pair: str) -> str:
    """Map a pair of factors to the parameter that it adapts.

    ...experts.lora.down -> ...experts.down_proj; for a linear, ...up_proj.lora ->
    ...up_proj.weight.
    """
    module, _, part = pair.rpartition(".lora.")
    return (
        f"{module}.{_IN_MODEL[part]}"
        if part in _IN_MODEL
        else f"{pair.removesuffix('.lora')}.weight"
    )


def peft_shapes(name: str, experts: Any, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an expert module's factors in a file, by wrapper and factor."""
    count, inner, hidden = expert_sizes(experts)
    shapes: dict[str, tuple[int, ...]] = {}
    for wrapper, rows, columns in ((f"{name}{NESTED}", 2 * inner, hidden), (name, hidden, inner)):
        shapes[f"{wrapper}.lora.A"] = (count * rank, columns)
        shapes[f"{wrapper}.lora.B"] = (rows, rank * count)
    return shapes


def peft_targets(targets: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Return the target fields of `adapter_config.json` for adapters of these names."""
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
