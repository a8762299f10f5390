"""A Hugging Face model without weights, to look at or to fill."""

from __future__ import annotations

from typing import Any

from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


def empty_causal_lm(
    config: PretrainedConfig, trust_remote_code: bool, **settings: Any
) -> PreTrainedModel:
    """The model with parameters on the meta device and buffers in place."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, **settings
        )
