"""Configurations as transformers reads them, where SGLang has a class of its own for a model.

Its transformers backend builds transformers' model from them, and SGLang's OLMo-3 lacks what that asks
for (rope_parameters), so the engine would die at its start.
Source: _CONFIG_REGISTRY, sglang/srt/utils/hf_transformers/common.py. Can go when the backend reads
transformers' configurations.
"""

from __future__ import annotations

from sglang_patches import registry

MODEL_TYPES = ("olmo3",)


def install() -> None:
    from sglang.srt.utils.hf_transformers import common
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type in MODEL_TYPES:
        common._CONFIG_REGISTRY.pop(model_type, None)
        CONFIG_MAPPING._extra_content.pop(model_type, None)
    registry.note("transformers' configurations")
