"""From --lora-* to the adapters of a model."""

from __future__ import annotations

from onpolicy.config import TrainConfig
from onpolicy.config.tools import ServeConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.adapters import target_names
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import has_experts
from onpolicy.models.peft_adapter import read_peft_adapter
from onpolicy.models.peft_format import require_adapter_fits


def adapter_of(config: TrainConfig | ServeConfig, facts: ModelFacts) -> AdapterShape | None:
    """The adapters that a run trains; None if it trains all weights.

    Raises ConfigError for linears that the model does not have, or that cannot be adapted.
    """
    if not isinstance(config, TrainConfig) or not config.lora.lora_rank:
        return None
    rank, asked = config.lora.lora_rank, config.lora.lora_target_modules
    if has_experts(facts.config):
        raise ConfigError(
            f"--lora-rank={rank}: model_type={facts.config.model_type} has experts, which are not "
            "adapted yet. Choose a dense model, or leave --lora-rank out."
        )
    targets = target_names(facts.model, asked)
    if given := config.lora.lora_adapter:
        adapter = read_peft_adapter(given, "--lora-adapter")
        require_adapter_fits(adapter, facts.model, config.model.hf_checkpoint, "--lora-adapter")
    return AdapterShape(rank=rank, scale=config.lora.scale, targets=targets)
