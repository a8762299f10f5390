"""The check that a checkpoint fits on the disk, before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PretrainedConfig

from onpolicy.config.sft import AnyRun
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import adapter_size
from onpolicy.system.memory import gib

MASTER = 3 * 4
"""The bytes of training state for a parameter: its float32 weight and two moments of AdamW."""


def require_room(
    config: AnyRun, hf_config: PretrainedConfig, adapter: AdapterShape | None = None
) -> None:
    """Raise ConfigError, with the sum, if a checkpoint (of adapters alone, if any) does not fit."""
    trust = config.model.trust_remote_code
    parameters = _saved_parameters(hf_config, trust, adapter)
    if critic := config.critic_checkpoint:
        parameters += _saved_parameters(load_config(critic, trust, "--critic-load"), trust)
    computed = getattr(torch, config.model.dtype).itemsize
    trained = MASTER + (computed if _saves_computed_weights(config) else 0)
    needed = parameters * (trained + computed)
    free = free_bytes(Path(config.output.save))
    if needed > free:
        raise ConfigError(
            f"--save={config.output.save}: a checkpoint takes {parameters:,} parameters"
            f"{_whose(adapter is not None, bool(critic))} x ({trained} bytes of training state + "
            f"{computed} of exported weights) = {gib(needed)} GiB, and {gib(free)} GiB are free there. "
            "Make room, or choose another directory."
        )


def _saved_parameters(
    hf_config: PretrainedConfig, trust_remote_code: bool, adapter: AdapterShape | None = None
) -> int:
    """Return the number of a model's parameters that a checkpoint holds."""
    model = empty_causal_lm(hf_config, trust_remote_code)
    return adapter_size(model, adapter) if adapter else sum(x.numel() for x in model.parameters())


def _whose(has_adapter: bool, has_critic: bool) -> str:
    """Return the owners of the parameters, in words; "" if they are all of one model."""
    policy = "adapters" if has_adapter else "policy" * has_critic
    return f" of {policy}{' and critic' * has_critic}" if policy else ""


def _saves_computed_weights(config: AnyRun) -> bool:
    """Return whether weights in compute dtype are saved beside the master weights, as Megatron does if
    they are different tensors."""
    distributed = config.megatron.megatron_distributed_optimizer
    others = distributed or config.model.dtype != "float32"
    return config.trainer.train_backend == "megatron" and others


def free_bytes(directory: Path) -> int:
    """Return the bytes that an ordinary user may still write at a directory, present or planned."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(there).free
