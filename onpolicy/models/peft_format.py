"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

Source: `LoraConfig` and `get_peft_model_state_dict` of the package peft.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from onpolicy.config.groups import LoraConfig
from onpolicy.contract import AdapterShape
from onpolicy.models.adapters import is_adapters
from onpolicy.weights.digest import WeightBucket, write_weights

PREFIX = "base_model.model."


def export_adapter(
    buckets: Iterable[WeightBucket],
    directory: Path,
    base: str,
    shape: AdapterShape,
    flags: LoraConfig,
) -> None:
    """Write the adapters among these weights into a new directory; `base`: the model they are beside."""
    directory.mkdir()
    tensors = [
        (_name_in_peft(name), tensor)
        for bucket in buckets
        for name, tensor in bucket
        if is_adapters(name)
    ]
    write_weights(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": shape.rank,
        "lora_alpha": flags.lora_alpha,
        "use_rslora": flags.lora_rslora,
        "target_modules": list(shape.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _name_in_peft(name: str) -> str:
    """model.layers.0.mlp.up_proj.lora.A -> base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"""
    linear, factor = name.rsplit(".lora.", 1)
    return f"{PREFIX}{linear}.lora_{factor}.weight"
