"""Parts of the trainer's model for the engine's, built here as the trainer builds it: on a CPU.

SGLang builds the same model on the device it serves from, drops the part that makes logits, and handles
buffers and logits in its own way.

- On a GPU the inverse rotary frequencies are powers computed by that GPU, and a CPU rounds some of them
  otherwise. So loaded buffers are overwritten, with the trainer's.
- The transformers backend leaves out the bias of the output projection (Phi, Phi-3.5-MoE), and its
  loader then finds no place for the weights.
- The treatment of logits is in lm_head.py.

Source: DefaultModelLoader.load_model, sglang/srt/model_loader/loader.py; CausalMixin.__init__,
sglang/srt/models/transformers.py. Can go when SGLang builds buffers on the CPU, and asks the model for a
bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.errors import ContractError
from onpolicy.models.empty import empty_causal_lm
from sglang_patches import registry
from sglang_patches.lm_head import use_logits_rule

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
HEAD_TARGET = "sglang.srt.models.transformers.CausalMixin.__init__"


def install() -> None:
    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        decoder = runner.model.model
        trainers = trainers_model(decoder.config)
        use_cpu_buffers(decoder, trainers)
        if runner.model.logits_processor is not None:
            use_logits_rule(runner.model.logits_processor, trainers)
        return result

    registry.hook(HEAD_TARGET, _add_bias, "after")
    registry.hook(TARGET, after_load, "after")


def trainers_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of an engine's configuration, without weights."""
    # SGLang trusted the checkpoint's code, if there is any, when it built the model itself.
    with torch.device("cpu"):
        return empty_causal_lm(
            config, trust_remote_code=True, attn_implementation="eager", dtype=config.dtype
        )


def _add_bias(result: Any, model: Any, *_: Any, **__: Any) -> Any:
    from sglang.srt.utils import set_weight_attrs

    head, trainers = model.lm_head, trainers_model(model.config).get_output_embeddings()
    if head is not None and trainers.bias is not None:
        head.bias = nn.Parameter(head.weight.new_empty(head.weight.shape[0]))
        set_weight_attrs(head.bias, {"output_dim": 0, "weight_loader": head.weight_loader})
    return result


def use_cpu_buffers(model: PreTrainedModel, trainers: PreTrainedModel) -> None:
    """Overwrite the buffers of a decoder, a Hugging Face base model, with the trainer's; except
    buffers from the checkpoint, which the trainer's model lacks here."""
    held, stored = dict(model.named_buffers()), trainers.base_model.state_dict().keys()
    for name, buffer in trainers.base_model.named_buffers():
        if name not in held or held[name].dtype != buffer.dtype:
            raise ContractError(
                f"buffer={name}: the engine's model does not hold it as {buffer.dtype}, so it is not "
                "the model that the trainer runs. Install a supported SGLang."
            )
        if name not in stored:
            held[name].copy_(buffer)
