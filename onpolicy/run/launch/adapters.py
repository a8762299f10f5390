"""The adapters of a model, from the flags --lora-*."""

from __future__ import annotations

from onpolicy.config import TrainConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.experts import expert_names
from onpolicy.models.facts import ModelFacts
from onpolicy.models.lora.adapters import target_names
from onpolicy.models.lora.peft_adapter import read_peft_adapter
from onpolicy.models.lora.peft_experts import FUSED_NAMES
from onpolicy.models.lora.peft_format import require_adapter_fits


def adapter_of(config: TrainConfig, facts: ModelFacts) -> AdapterShape | None:
    """Return the shape of the adapters that a run trains, or None if all weights are trained.

    Raises ConfigError for linears that the model does not have, or that cannot be adapted.
    """
    if not config.lora.lora_rank:
        return None
    rank, asked = config.lora.lora_rank, config.lora.lora_target_modules
    targets = target_names(facts.model, asked)
    alike = FUSED_NAMES.intersection(targets)
    experts = expert_names(facts.model)
    if alike and experts and not experts.intersection(targets):
        raise ConfigError(
            f"--lora-target-modules={asked}: PEFT takes {', '.join(sorted(alike))} of a mixture for its "
            "experts, so it could not read the adapter. Name the experts too, or none of these."
        )
    if given := config.lora.lora_adapter:
        adapter = read_peft_adapter(given, "--lora-adapter")
        require_adapter_fits(adapter, facts.model, config.model.hf_checkpoint, "--lora-adapter")
    return AdapterShape(rank=rank, scale=config.lora.scale, targets=targets)
