"""From --lora-* to the adapters of a model."""

from __future__ import annotations

from collections.abc import Sequence

from onpolicy.config import TrainConfig
from onpolicy.config.tools import ServeConfig
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.adapters import target_names
from onpolicy.models.experts import expert_names
from onpolicy.models.facts import ModelFacts
from onpolicy.models.peft_adapter import read_peft_adapter
from onpolicy.models.peft_experts import FUSED_NAMES
from onpolicy.models.peft_format import require_adapter_fits

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})


def adapter_of(config: TrainConfig | ServeConfig, facts: ModelFacts) -> AdapterShape | None:
    """The adapters that a run trains, or that a server holds for runs; None: all weights are trained.

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
    of_sglang = config.lora.rollout_lora == "sglang"
    if of_sglang:
        _require_servable(targets, is_mixture=bool(experts))
    return AdapterShape(
        rank=rank,
        scale=config.lora.scale,
        targets=targets,
        dora=config.lora.lora_dora,
        of_sglang=of_sglang,
    )


def _require_servable(targets: Sequence[str], *, is_mixture: bool) -> None:
    """Raise ConfigError for names whose adapters SGLang is not known to compute: it has one product for
    queries, keys and values, and one for gate and up, and drops what it cannot put together."""
    needs = {"k_proj": "q_proj", "v_proj": "q_proj", "q_proj": "v_proj", "up_proj": "gate_proj"}
    known = ATTENTION if is_mixture else ATTENTION | MLP
    alone = [f"{name} without {needs[name]}" for name in targets
             if needs.get(name, name) not in targets]  # fmt: skip
    if refused := sorted({*targets} - known) + alone:
        raise ConfigError(
            f"--rollout-lora=sglang: adapters of {', '.join(refused)} are none that SGLang is known to "
            f"compute here; those are {', '.join(sorted(known))}, of which it wants q_proj with v_proj, "
            "k_proj with both, and up_proj with gate_proj. Give --lora-target-modules so, or use "
            "--rollout-lora merged."
        )
