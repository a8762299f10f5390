"""A reader of a published config.json that returns a configuration of transformers' own class.

Published checkpoints often name Python code of their own (`auto_map`), mostly because they are
older than transformers' class. Where transformers has the architecture, its class is used and the
code is never run. Of a model that also sees images only the text part is built. Both engines read
configurations by this function, so they build the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onpolicy.errors import ConfigError
from onpolicy.models.text_part import WHOLE_MODELS
from onpolicy.system.files import read_json_object

_OF_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config")
"""Fields that count for the whole model where its config.json has them."""


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
    config = _text_config(config, raw)
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


def _text_config(whole: PretrainedConfig, raw: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of a model's text part; `whole` itself if its text part is not known.

    raw: what config.json says. A value that it leaves out is that of the text part: transformers'
    whole Mistral-3 has tied embeddings by default, and its published head is another matrix.
    """
    text = whole.get_text_config()
    if WHOLE_MODELS.get(whole.model_type) != text.model_type:
        return whole
    if text.model_type == "qwen3_vl_text":
        text = _as_qwen3(text)
    for name in _OF_WHOLE:
        if raw.get(name) is not None:
            setattr(text, name, raw[name])
    text.dtype = whole.dtype or text.dtype
    text.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    return text


def _as_qwen3(text: PretrainedConfig) -> PretrainedConfig:
    """Return Qwen3-VL's text part as Qwen3, whose layers are the same; transformers has no causal LM
    of its own for it.

    A token of text has one position in time, height and width, so its angles are the plain ones, and
    nothing of an image is added to its first layers.
    """
    fields = text.to_dict()
    rope = {k: x for k, x in fields.pop("rope_parameters").items() if not k.startswith("mrope_")}
    del fields["model_type"]
    return Qwen3Config(**fields, rope_parameters=rope)
