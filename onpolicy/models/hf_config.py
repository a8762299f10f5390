"""Checks of a Hugging Face checkpoint before anything is started with it.

An error that would otherwise appear ten minutes later inside an engine is raised here at once: a
missing or truncated file, untrusted code, an architecture that the two engines cannot align.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError, in_one_line
from onpolicy.models.align import unaligned_modules
from onpolicy.models.delta_net import delta_nets, has_delta_nets
from onpolicy.models.expert_layers import (
    expert_blocks,
    has_usual_experts,
    routers_of,
    unusual_experts,
)
from onpolicy.models.facts import ModelFacts
from onpolicy.models.llama4 import is_llama4
from onpolicy.models.logits import logits_rule
from onpolicy.models.lora.peft_adapter import CONFIG as ADAPTER
from onpolicy.models.published import own_class, read_config
from onpolicy.models.rotary_factors import choose_factors, context_limit
from onpolicy.models.text_part import WHOLE_MODELS
from onpolicy.models.weight_files import CheckpointReader, quantised_by
from onpolicy.system.files import read_json_object

logger = logging.getLogger(__name__)

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Sizes that every part of onpolicy reads from a configuration."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""Kinds of attention with aligned operators. Llama-4's chunks are whole sequences (`llama4.py`)."""

STATEFUL_LAYERS = {"conv", "linear_attention", "mamba", "recurrent"}
"""Kinds of layers that read earlier tokens by a state of their own."""


def load_config(
    path: str,
    trust_remote_code: bool = False,
    flag: str = "--hf-checkpoint",
    context: int | None = None,
) -> PretrainedConfig:
    """Load the checkpoint's configuration, after checking that its files are there and complete.

    context: the contract's context length, for a configuration to compute with.
    Raise ConfigError, which names `flag`, for any problem with the directory.
    """
    directory = Path(path)
    if not path:
        raise ConfigError(
            f"{flag} is missing: a directory with a checkpoint is needed. Give its path."
        )
    if not (directory / "config.json").is_file():
        rule = (
            f"is an adapter ({ADAPTER}), which is nothing without its base. Merge both with `onpolicy "
            f"export --hf-checkpoint BASE --merge {path} --output OUT`, and give OUT."
            if (directory / ADAPTER).is_file()
            else "no config.json there. It must be a local directory with a Hugging Face checkpoint "
            "(config.json and *.safetensors), or OWNER/NAME of the hub."
        )
        raise ConfigError(f"{flag}={path}: {rule}")
    raw = read_json_object(directory / "config.json", f"{flag}={path}: config.json")
    num_tensors = len(CheckpointReader(directory, flag).shapes())
    if isinstance(layers := raw.get("num_hidden_layers"), int) and layers > num_tensors:
        raise ConfigError(
            f"{flag}={path}: num_hidden_layers={layers} in config.json, and the weights are "
            f"{num_tensors} tensors. They do not belong together; download the checkpoint again."
        )
    config = parse_config(path, trust_remote_code, flag)
    if raw.get("auto_map") and own_class(raw) is not None:
        _say_whose_code(f"{flag}={path}", type(config).__name__)
    if context is not None:
        choose_factors(config, context)
    return config


@cache
def _say_whose_code(name: str, kind: str) -> None:
    logger.info("%s: transformers' own model of its %s, not the checkpoint's code", name, kind)


def parse_config(
    path: str, trust_remote_code: bool = False, flag: str = "--hf-checkpoint"
) -> PretrainedConfig:
    """Parse the configuration of a causal language model from a directory with a config.json.

    Raise ConfigError, which names `flag`, if it is not such a configuration.
    """
    try:
        config = read_config(path, trust_remote_code, flag)
    except ConfigError:
        raise
    except Exception as error:  # its validators may raise anything
        raise ConfigError(
            f"{flag}={path}: transformers cannot read its config.json "
            f"({in_one_line(error)}). Choose a checkpoint that transformers "
            f"{transformers.__version__} knows, or download it again."
        ) from error
    if config.get_text_config() is not config:
        raise ConfigError(
            f"{flag}={path}: model_type={config.model_type} is made of several models "
            f"({', '.join(config.sub_configs)}), and which of them reads text, and how, is not known. "
            "Choose a language model (*ForCausalLM), or one whose text part is trained: "
            f"{', '.join(WHOLE_MODELS)}. docs/published.md has the lines that write a text part alone."
        )
    for name in SIZES:
        size = getattr(config, name, None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{flag}={path}: {name}={size} in config.json, and it must be a whole number of at "
                "least 1. Choose a causal language model, or download the checkpoint again."
            )
    return config


def require_sequences_apart(config: PretrainedConfig) -> None:
    """Raise ConfigError for a model whose layers would carry a state from one sequence of a packed
    batch into the next: transformers' own code of such layers knows of no borders."""
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    model_class = getattr(transformers, architecture, None)
    kinds = {*(getattr(config, "layer_types", None) or ())} & STATEFUL_LAYERS
    if has_delta_nets(config) or not (kinds or getattr(model_class, "_is_stateful", False)):
        return
    raise ConfigError(
        f"architecture={architecture}, which has linear attention or state-space layers other than "
        "gated delta networks: in training they would carry the state of one sequence into the next. "
        "Choose another checkpoint."
    )


def require_alignable(facts: ModelFacts, max_context_len: int) -> None:
    """Raise ConfigError if SGLang's transformers backend and the trainer cannot agree to the last bit.

    The error names the property, its value and the remedy.
    """
    require_sequences_apart(facts.config)
    architecture = (getattr(facts.config, "architectures", None) or ["none"])[0]
    problems = _problems(facts.config, architecture)
    problems = problems or _problems_of_model(facts)
    problems = problems or _problems_of_attention(facts, max_context_len)
    for problem in problems:
        raise ConfigError(
            f"architecture={architecture}, {problem}. Choose another checkpoint, or run without "
            "--true-on-policy-mode."
        )


def _problems(config: PretrainedConfig, architecture: str) -> list[str]:
    def value(name: str) -> Any:
        return getattr(config, name, None)

    problems = []
    model_class = getattr(transformers, architecture, None)
    is_known = has_delta_nets(config)  # transformers' flags do not know their operators
    if not architecture.endswith("ForCausalLM"):
        problems.append("which is not a causal language model (*ForCausalLM)")
    elif not (is_known or getattr(model_class, "_supports_attention_backend", True)):
        problems.append("which transformers cannot run with another attention function")
    known = LAYER_TYPES | ({"chunked_attention"} if is_llama4(config) else set())
    known |= {"linear_attention"} if is_known else set()
    if kinds := sorted(set(value("layer_types") or ()) - known):
        problems.append(
            f"layer_types={kinds}: only full and sliding attention have aligned operators"
        )
    if value("clip_qkv") is not None:
        problems.append(f"clip_qkv={value('clip_qkv')}: transformers clips what a gradient needs")
    if method := quantised_by(config):
        problems.append(
            f"quantization_config={method}: only weights in float32 or bfloat16 have aligned operators; "
            "docs/published.md has the lines that write FP8, MXFP4 and compressed-tensors in bfloat16"
        )
    return problems


def _problems_of_attention(facts: ModelFacts, max_context_len: int) -> list[str]:
    """Return the problems of attention that only the configuration shows, not the layers' calls."""
    config, layers = facts.config, facts.attention
    softcap = getattr(config, "attn_logit_softcapping", None) or None
    window = getattr(config, "sliding_window", None) or None  # some configurations say 0 for none
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    wanted = [
        window if one == "sliding_attention" else None for one in types if one != "linear_attention"
    ]
    problems = []
    if context_limit(config) < max_context_len:
        problems.append(
            f"rope_type=dynamic: beyond max_position_embeddings={config.max_position_embeddings} its "
            "angles depend on the other sequences of a batch, and the engine would serve "
            f"{max_context_len} tokens; lower --sglang-context-length"
        )
    elif len(layers) + len(delta_nets(facts.model)) != config.num_hidden_layers:
        problems.append(
            f"num_hidden_layers={config.num_hidden_layers}, of which {len(layers)} call an attention "
            "function: the others have no aligned operator"
        )
    elif window and window < max_context_len and [x.window for x in layers] != wanted:
        problems.append(
            f"sliding_window={window}, smaller than the longest context {max_context_len}: its layers "
            "do not say so to their attention function, where aligned operators would learn of it"
        )
    if any(x.softcap != softcap for x in layers):
        problems.append(f"attn_logit_softcapping={softcap}: its layers do not ask for it")
    return problems


def has_experts(config: PretrainedConfig) -> bool:
    """Return whether the model is a mixture of experts."""
    return bool(_num_experts(config))


def _num_experts(config: PretrainedConfig) -> str:
    """Return the configuration's number of experts as `name=value`, empty for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)}"
    return ""


def _problems_of_model(facts: ModelFacts) -> list[str]:
    model, experts = facts.model, _num_experts(facts.config)
    problems = _problems_of_experts(model, experts) if experts else []
    if classes := unaligned_modules(model, facts.norms):
        problems.append(f"{', '.join(classes)}: has no aligned operator")
    routers = {router for block in expert_blocks(model) for router in routers_of(block)}
    linears = {m for m in model.modules() if isinstance(m, nn.Linear)} - routers
    if kinds := {type(m) for m in linears} - {nn.Linear}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        problems.append(f"{names}: SGLang's transformers backend takes it for a plain linear layer")
    if logits_rule(model) is None:
        problems.append("what its forward pass does to logits has no aligned operator")
    return problems


def _problems_of_experts(model: PreTrainedModel, num_experts: str) -> list[str]:
    if classes := unusual_experts(model):
        return [
            f"{num_experts} in {', '.join(classes)}: only experts that transformers holds in "
            "gate_up_proj and down_proj, with or without biases, have an aligned operator"
        ]
    if not any(has_usual_experts(module) for module in model.modules()):
        return [f"{num_experts}: none of its modules is known to hold experts"]
    return []
