"""Sequence classifiers of Hugging Face: a decoder, and one number of its last token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PretrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import VALUE_HEAD, require_fit, stored_shapes

_ENDING = "ForSequenceClassification"


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether the checkpoint of this configuration is a sequence classifier."""
    return str((getattr(config, "architectures", None) or [""])[0]).endswith(_ENDING)


def as_decoder(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with the name of the causal language model whose layers the classifier has."""
    found = copy.deepcopy(config)
    found.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return found


def require_rewards(
    path: str, config: PretrainedConfig, trust_remote_code: bool, flag: str
) -> None:
    """Raise ConfigError, which blames `flag`, unless the checkpoint is a classifier that is served as
    transformers computes it: one number, by a linear layer without a bias, of a decoder's last token.

    Source: GenericForSequenceClassification, transformers/modeling_layers.py.
    """
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    known: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    name = f"{flag}={path}: architecture={architecture}"
    if not is_classifier(config) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{name} is no sequence classifier of a decoder (such as Qwen3{_ENDING}). Choose another."
        )
    if known is None or not issubclass(known, GenericForSequenceClassification):
        raise ConfigError(
            f"{name} has a head of its own in transformers, whose numbers SGLang would not give. Choose "
            f"one whose head is one linear layer, such as Qwen2, Qwen3 or Llama{_ENDING}."
        )
    if config.num_labels != 1:
        raise ConfigError(
            f"{name} has num_labels={config.num_labels}, and a reward is one number. Choose a "
            "checkpoint with one label."
        )
    require_fit(path, as_decoder(config), trust_remote_code, flag, of_critic=True)
    heads = [n for n in stored_shapes(Path(path), flag) if n.startswith(VALUE_HEAD)]
    if heads != [f"{VALUE_HEAD}weight"]:
        raise ConfigError(
            f"{name} has the tensors {', '.join(heads) or 'none'} of a head, and it needs score.weight "
            "alone. Choose another checkpoint."
        )
