"""Looks at a Hugging Face checkpoint before anything is started with it.

What would fail ten minutes later inside an engine is said here at once: a missing or truncated
file, code that would have to be trusted, an architecture that the two engines cannot align.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.experts import has_usual_experts, unusual_experts

INDEX = "model.safetensors.index.json"


def load_config(path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The checkpoint's configuration, after checking that its files are there and complete."""
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"--hf-checkpoint={path}: no config.json there. It must be a local directory with a "
            "Hugging Face checkpoint (config.json and *.safetensors); download it first."
        )
    raw = _read_json(directory / "config.json")
    if raw.get("auto_map") and not trust_remote_code:
        raise ConfigError(
            f"--hf-checkpoint={path}: its config.json asks to run the checkpoint's own Python code "
            f"(auto_map={raw['auto_map']}). Read that code; if you trust it, add --trust-remote-code."
        )
    _check_weight_files(directory)
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _check_weight_files(directory: Path) -> None:
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(_read_json(index)["weight_map"].values()))
    else:
        names = sorted(file.name for file in directory.glob("*.safetensors"))
    if not names:
        raise ConfigError(
            f"--hf-checkpoint={directory}: no *.safetensors file there. Convert the weights with "
            "transformers' save_pretrained; pickled weights (*.bin) are not loaded."
        )
    for name in names:
        _check_safetensors(directory / name)


def _check_safetensors(file: Path) -> None:
    """Compare the file's size with what its header promises."""
    if not file.is_file():
        raise ConfigError(f"{file}: missing, but {INDEX} names it. Download the checkpoint again.")
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            (header_size,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(header_size))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + header_size + max(ends, default=0)
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"{file}: not a safetensors file ({error}). Download it again."
        ) from error
    if size != expected:
        raise ConfigError(
            f"{file}: {size} bytes, but its header promises {expected}: the file is truncated or "
            "damaged. Download it again."
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error}). Download it again.") from error


def require_alignable(
    config: PretrainedConfig, max_context_len: int, trust_remote_code: bool = False
) -> None:
    """Refuse what SGLang's transformers backend and the trainer cannot compute to the same bits.

    Raises ConfigError that names the property, its value and what is possible instead.
    """
    architecture = (getattr(config, "architectures", None) or ["none"])[0]
    problems = _problems(config, architecture, max_context_len)
    if experts := _num_experts(config):
        problems += _problems_of_experts(empty_causal_lm(config, trust_remote_code), experts)
    for problem in problems:
        raise ConfigError(
            f"architecture={architecture}, {problem}. Choose another checkpoint, or run without "
            "--true-on-policy-mode."
        )


def _problems(config: PretrainedConfig, architecture: str, max_context_len: int) -> list[str]:
    def value(name: str) -> Any:
        return getattr(config, name, None)

    problems = []
    model_class = getattr(transformers, architecture, None)
    if not architecture.endswith("ForCausalLM"):
        problems.append("which is not a causal language model (*ForCausalLM)")
    elif model_class is not None and not getattr(model_class, "_supports_attention_backend", True):
        problems.append("which transformers cannot run with another attention function")
    if kinds := sorted(set(value("layer_types") or ()) - {"full_attention"}):
        problems.append(f"layer_types={kinds}: only full attention has an aligned operator")
    window = value("sliding_window")
    if window and window < max_context_len:  # some configurations say 0 for none
        problems.append(
            f"sliding_window={window}, smaller than the longest context {max_context_len}: SGLang's "
            "transformers backend ignores the window and the trainer would not"
        )
    rope = value("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        problems.append(
            f"rope_type={rope['rope_type']}: its angles depend on the other sequences of a batch"
        )
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "quantization_config"):
        if value(name):
            problems.append(f"{name}={value(name)}: has no aligned operator")
    for name in ("logit_scale", "logits_scaling"):
        if value(name) not in (None, 1, 1.0):
            problems.append(
                f"{name}={value(name)}: logits are scaled differently by the two engines"
            )
    return problems


def has_experts(config: PretrainedConfig) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(_num_experts(config))


def _num_experts(config: PretrainedConfig) -> str:
    """The configuration's number of experts as `name=value`, empty for a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)}"
    return ""


def _problems_of_experts(model: PreTrainedModel, num_experts: str) -> list[str]:
    if classes := unusual_experts(model):
        return [
            f"{num_experts} in {', '.join(classes)}: only experts of two parameters, gate_up_proj "
            "[E, 2 I, H] with the gate first and down_proj [E, H, I], have an aligned operator"
        ]
    if not any(has_usual_experts(module) for module in model.modules()):
        return [f"{num_experts}: none of its modules is known to hold experts"]
    return []
