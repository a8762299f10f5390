"""Gives the engine the trainer's rotary frequencies, to the last bit.

SGLang builds the Hugging Face model on the device it serves from, so on a GPU the inverse frequencies
are powers computed by that GPU. The trainer's are computed by a CPU, which rounds some of them
otherwise. Loaded buffers are therefore overwritten with those of a model built on the CPU.
Source: DefaultModelLoader.load_model, sglang/srt/model_loader/loader.py. Can go when buffers are built
on the CPU there, or loaded with the weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from onpolicy.errors import ContractError
from onpolicy.models.empty import empty_causal_lm
from sglang_patches import registry

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install() -> None:
    registry.hook(TARGET, _after_load, "after")


def _after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
    use_cpu_buffers(runner.model.model)
    return result


def use_cpu_buffers(model: PreTrainedModel) -> None:
    """Overwrite the buffers of a decoder (a Hugging Face base model) as if it were built on a CPU."""
    held = dict(model.named_buffers())
    for name, buffer in _cpu_model(model).named_buffers():
        if name not in held or held[name].dtype != buffer.dtype:
            raise ContractError(
                f"buffer={name}: the engine's model does not hold it as {buffer.dtype}, so it is not "
                "the model that the trainer runs. Install a supported SGLang."
            )
        held[name].copy_(buffer)


def _cpu_model(model: PreTrainedModel) -> nn.Module:
    # SGLang trusted the checkpoint's code, if there is any, when it built the model itself.
    config = copy.deepcopy(model.config)  # from which the engine's model reads its attention
    with torch.device("cpu"):
        whole = empty_causal_lm(config, trust_remote_code=True, attn_implementation="eager")
    return whole.base_model
