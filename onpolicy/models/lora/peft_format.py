"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

For experts PEFT adapts the parameters of the module that holds a layer's experts. It wraps the
module twice: for gate_up_proj, and around that for down_proj. Its A is [E r, in], and its B [out, r
E], whose columns vary fastest over the experts.
Source: `LoraConfig`, `get_peft_model_state_dict`, `ParamWrapper` and `_inject_parameters` of the
package peft (0.21).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onpolicy.config.groups import LoraConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.expert_layers import expert_sizes, has_usual_experts
from onpolicy.models.lora.adapters import FactorValues, first_values, is_adapters
from onpolicy.models.lora.peft_adapter import (
    CONFIG,
    NESTED,
    WEIGHTS,
    PeftAdapter,
    linear_of,
    read_peft_adapter,
)
from onpolicy.models.text_part import has_text_part, name_in_whole
from onpolicy.weights.digest import WeightBucket, write_weights

PREFIX = "base_model.model."


def export_adapter(
    buckets: Iterable[WeightBucket],
    directory: Path,
    base: str,
    shape: AdapterShape,
    flags: LoraConfig,
) -> None:
    """Write the adapters among these weights into a new directory.

    `base` is the path or name of the model. Those of a text part are named as in the whole model.
    """
    directory.mkdir()
    tensors = [pair for bucket in buckets for pair in bucket if is_adapters(pair[0])]
    in_peft = [of_experts(name, tensor) or (name, tensor) for name, tensor in tensors]
    targets = peft_targets(shape.targets, [name for name, _ in tensors])
    if has_text_part(base):
        in_peft = [(name_in_whole(name, base), tensor) for name, tensor in in_peft]
        targets |= {"target_modules": _of_text_part(targets["target_modules"])}
    write_weights([(_name_in_peft(n), x) for n, x in in_peft], directory / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": flags.lora_alpha,
        "use_rslora": flags.lora_rslora,
        "use_dora": False,
        **targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2))


def _of_text_part(targets: Iterable[str]) -> str:
    """Return PEFT's pattern of linears, since the tower has linears of the same names."""
    return rf".*language_model\..*\.({'|'.join(targets)})"


def first_factors(begins_with: str, seed: int) -> FactorValues:
    """Return the initial factors: the adapter in `begins_with`, if given, or random ones."""
    adapter = read_peft_adapter(begins_with, "--lora-adapter") if begins_with else None
    given = read_factors(adapter) if adapter else {}

    def values(name: str, shape: torch.Size) -> Tensor | None:
        found = given.get(name)
        return first_values(name, shape, seed) if found is None else found

    return values


def read_factors(adapter: PeftAdapter) -> dict[str, Tensor]:
    """Return the values of a checked adapter, with the names and shapes of a model's parameters.

    They keep the stored dtype.
    Raise ConfigError unless all are finite.
    """
    tensors = load_file(adapter.directory / WEIGHTS)
    for key, x in tensors.items():
        if count := int((~x.float().isfinite()).sum()):
            raise ConfigError(
                f"{adapter.directory / WEIGHTS}: {count} of {x.numel()} numbers of {key} are not "
                "finite: nothing can be computed with them. Take an earlier checkpoint of the adapter."
            )
    stored = {linear_of(key): x for key, x in tensors.items()}
    modules = {module for module, _ in stored}
    experts = {m for m in modules if m.endswith(NESTED) or f"{m}{NESTED}" in modules}
    return dict(
        from_peft(module, factor, x, adapter.rank)
        if module in experts
        else (f"{module}.lora.{factor}", x)
        for (module, factor), x in stored.items()
    )


def require_adapter_fits(adapter: PeftAdapter, model: nn.Module, path: str, flag: str) -> None:
    """Raise ConfigError unless an adapter belongs to the base in `path` and fits its `model`.

    The model has no weights. The adapter must cover every linear, and all experts, that its targets
    name.
    """
    name = f"{flag}={adapter.directory}"
    if not _is_base(adapter.base, path):
        raise ConfigError(
            f"{name}: is an adapter of {adapter.base}, and --hf-checkpoint={path} is another model. "
            f"Give that one; if it is the same by another name, write this one into {CONFIG}."
        )
    targets, rank = set(adapter.targets.split(",")), adapter.rank
    needed: dict[str, tuple[int, ...]] = {}
    for linear, module in model.named_modules():
        if linear.rpartition(".")[2] not in targets:
            continue
        if has_usual_experts(module):
            needed |= peft_shapes(linear, module, rank)
        elif isinstance(module, nn.Linear):
            needed[f"{linear}.lora.A"] = (rank, module.in_features)
            needed[f"{linear}.lora.B"] = (module.out_features, rank)
    found = {".lora.".join(linear_of(key)): shape for key, shape in adapter.factors.items()}
    for each in sorted(needed.keys() | found.keys()):
        if needed.get(each) != found.get(each):
            have, need = (list(x[each]) if each in x else "none" for x in (found, needed))
            raise ConfigError(
                f"{name}: {each} is {have} there, and this model needs {need}: an adapter here is "
                "beside every linear of a name, in every layer, and beside both matrices of experts. "
                "Give an adapter of this model that is."
            )


def _is_base(told: str, path: str) -> bool:
    """Return whether a model's name or path may mean the checkpoint's directory."""
    if not told or Path(told).is_dir():
        return not told or Path(told).resolve() == Path(path).resolve()
    here, name = Path(path).resolve(), Path(told).name
    return name == here.name or f"models--{told.replace('/', '--')}" in here.parts


def _name_in_peft(name: str) -> str:
    """Map our name of a factor to PEFT's.

    model.layers.0.mlp.up_proj.lora.A -> base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    """
    linear, factor = name.rsplit(".lora.", 1)
    return f"{PREFIX}{linear}.lora_{factor}.weight"


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


def peft_targets(targets: Iterable[str], names: Iterable[str]) -> dict[str, Any]:
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
