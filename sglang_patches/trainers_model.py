"""What a loaded model takes from the trainer's, which is built here as the trainer builds it: on a CPU.

SGLang builds the same model on the device it serves from, drops the part that makes logits, and keeps
buffers and logits in its own way; see buffers.py and lm_head.py.
Source: ModelRunner.load_model, sglang/srt/model_executor/model_runner.py.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import OUTSIDE, NumericsContract
from onpolicy.models.empty import empty_causal_lm
from sglang_patches import registry
from sglang_patches.buffers import use_cpu_buffers
from sglang_patches.lm_head import use_logits_rule

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install(contract: NumericsContract) -> None:
    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        decoder = runner.model.model
        trainers = trainers_model(decoder.config)
        use_cpu_buffers(decoder, trainers)
        if contract.aligns("linear", OUTSIDE):
            use_logits_rule(runner.model.logits_processor, trainers)
        return result

    registry.hook(TARGET, after_load, "after")


def trainers_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model of an engine's configuration, without weights."""
    # SGLang trusted the checkpoint's code, if there is any, when it built the model itself.
    with torch.device("cpu"):
        return empty_causal_lm(
            config, trust_remote_code=True, attn_implementation="eager", dtype=config.dtype
        )
