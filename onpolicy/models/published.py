"""A reader of a published config.json that returns a configuration of transformers' own class.

Published checkpoints often name Python code of their own (`auto_map`), mostly because they are
older than transformers' class. Where transformers has the architecture, its class is used and the
code is never run. Both engines read configurations by this function, so they build the same model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onpolicy.errors import ConfigError
from onpolicy.system.files import read_json_object


def read_config(
    path: str, trust_remote_code: bool = False, flag: str = "--hf-checkpoint"
) -> PretrainedConfig:
    """Load the configuration of a directory, by transformers' own class if it has one.

    Raise ConfigError, which names `flag`, if the checkpoint needs its own code and that is not
    trusted. Any error of transformers for an unreadable file passes through.
    """
    raw = read_json_object(Path(path) / "config.json", f"{flag}={path}: config.json")
    own = own_class(raw)
    if own is None:
        _require_trust(raw, trust_remote_code, f"{flag}={path}")
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code
        )
    elif is_known(raw.get("model_type")):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    else:
        config = own.from_pretrained(path)
        config.model_type = own.model_type  # type: ignore[misc]
    if own is not None and hasattr(config, "auto_map"):
        del config.auto_map
        if own.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[own.model_type]]
    if getattr(config, "is_heterogeneous", False):
        # SGLang reads head_dim, and transformers raises where layers differ (Gemma-4's). The value
        # is not used: the layers' own calls of attention have their sizes.
        config.allow_global_per_layer_attribute_access = True
    _keep_rotations_of_layers(config)
    _choose_alike_in_all_layers(config, f"{flag}={path}")
    return config


def own_class(raw: dict[str, Any]) -> type[PretrainedConfig] | None:
    """Return transformers' class for a config.json, by its model_type.

    For a config that brings code, fall back to its architecture (Kimi-K2's model_type is kimi_k2,
    and it is a DeepseekV3ForCausalLM).
    """
    if is_known(raw.get("model_type")):
        own: type[PretrainedConfig] = getattr(transformers, CONFIG_MAPPING_NAMES[raw["model_type"]])
        return own
    named = raw.get("architectures") if raw.get("auto_map") else None
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    return getattr(getattr(transformers, architecture, None), "config_class", None)


def is_known(model_type: object) -> bool:
    """Return whether transformers has a class for this model_type."""
    return str(model_type) in CONFIG_MAPPING_NAMES


def _require_trust(raw: dict[str, Any], trust_remote_code: bool, name: str) -> None:
    if raw.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            f"{name}: its config.json asks to run the checkpoint's own Python code "
            f"(auto_map={raw['auto_map']}), and transformers {transformers.__version__} has no class of "
            f"its own for model_type={raw.get('model_type')}. Read that code; if you trust it, add "
            "--trust-remote-code."
        )


def _keep_rotations_of_layers(config: PretrainedConfig) -> None:
    """Drop the entries of `rope_parameters` that belong to no kind of layer, if every kind has one.

    transformers fills in the entries of kinds that no layer has. Then it takes the whole dictionary
    for one entry of all layers and adds numbers to it, on which SGLang's can_enable_torch_compile
    fails (Gemma3TextConfig with fewer layers than its pattern, transformers 5.12 to 5.19).
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and all(isinstance(rope.get(kind), dict) for kind in kinds):
        config.rope_parameters = {kind: rope[kind] for kind in sorted(kinds)}


def _choose_alike_in_all_layers(config: PretrainedConfig, name: str) -> None:
    """Replace a list of the experts per token of every layer (HunYuan-A13B's) by its one value.

    SGLang keeps one record of routed experts, equally wide in all layers, and adds the list to a
    number to size it (RoutedExpertsCapturer, SGLang 0.5.23).
    Raise ConfigError if layers differ.
    """
    if getattr(config, "top_k_experts", None):  # Gemma-4's name for it, which SGLang does not know
        config.num_experts_per_tok = config.top_k_experts
    chosen: Any = getattr(config, "num_experts_per_tok", None)
    if not isinstance(chosen, list):
        return
    if len(set(chosen)) != 1:
        raise ConfigError(
            f"{name}: num_experts_per_tok={chosen} in config.json, other numbers in other layers, and "
            "SGLang records as many experts of a token in every layer. Choose another checkpoint."
        )
    config.num_experts_per_tok = chosen[0]
