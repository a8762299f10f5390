"""Keeps the model's own sizes on a CPU.

SGLang rounds intermediate sizes up to a multiple of 32 for AMX kernels before it builds a model on
a CPU, and then cannot load the checkpoint (208 against 224). Our platform has no such kernels, so
the configuration stays as it is wherever tensor parallelism divides the sizes.
Source: sglang/srt/configs/update_config.py. Can go when the rounding is limited to AMX.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"


def install() -> None:
    registry.hook(TARGET, _keep_config, "around")


def _keep_config(original: Any, model_config: Any, load_config: Any, tp_size: int) -> Any:
    divides = (
        model_config.num_attention_heads % tp_size == 0
        and model_config.get_total_num_kv_heads() % tp_size == 0
        and getattr(model_config.hf_text_config, "intermediate_size", 0) % tp_size == 0
    )
    return model_config if divides else original(model_config, load_config, tp_size)
