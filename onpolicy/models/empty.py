"""A Hugging Face model without weights, to look at or to fill."""

from __future__ import annotations

from typing import Any

from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError, in_one_line


def empty_causal_lm(
    config: PretrainedConfig, trust_remote_code: bool, **settings: Any
) -> PreTrainedModel:
    """The model with parameters on the meta device and buffers in place.

    Raises ConfigError for a configuration that is no causal language model's.
    """
    try:
        with init_empty_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, **settings
            )
            return model
    except Exception as error:  # whatever a model's own code raises for impossible sizes
        raise ConfigError(
            f"model_type={config.model_type}: transformers cannot build a causal language model from "
            f"its config.json ({in_one_line(error)}). Choose another checkpoint, or download it again."
        ) from error
