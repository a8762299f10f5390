"""The trainer's model in the place of SGLang's: aligned, checked, with its adapters.

An aligned engine uses SGLang's transformers backend, which differs from the trainer as follows:

- It swaps every `*RMSNorm` for its own. The swap is prevented, so that both engines hold the same
  Hugging Face modules, and both then get the same replacements from `onpolicy.models.align`. When
  the model is loaded, the operators are run at its shapes and their digest is reported. Source:
  replace_rms_norm_class, sglang/srt/models/transformers.py. Can go when a caller can keep HF
  modules.
- It does not know the trainer's adapters. They are put beside its linears. A tensor-parallel rank
  has the rows of B, or the columns of A, that belong to its part of the weight; the last rows of an
  output projection may be padding. Source: replace_linear_class in the same file;
  AutoWeightsLoader._load_param, sglang/srt/models/utils.py, which asks a parameter for its
  `weight_loader`.
- It builds the model on the device it serves from. On a GPU the inverse rotary frequencies are
  powers computed by that GPU, and a CPU rounds some of them otherwise. So loaded buffers are
  overwritten by buffers built on a CPU, like the trainer's. Source: DefaultModelLoader.load_model,
  sglang/srt/model_loader/loader.py. Can go when SGLang builds buffers on the CPU.
- It leaves out the bias of the output projection (Phi, Phi-3.5-MoE), and its loader then finds no
  place for the weights. It also treats logits in its own way: see lm_head.py. Source:
  CausalMixin.__init__, sglang/srt/models/transformers.py. Can go when it asks the model for a bias.
- To look its name up, SGLang imports its two hundred model definitions, which takes seconds in each
  process that holds a model. All others are left out. Source: import_model_classes,
  sglang/srt/models/registry.py. Can go when SGLang looks up by name.
"""

from __future__ import annotations

import os
import pkgutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.models.align import align_modules
from onpolicy.models.empty import empty_causal_lm, hand_on_keywords
from onpolicy.models.lora.adapters import adapters, add_adapters
from onpolicy.ops import Operators
from onpolicy.ops.backends import backend_of
from onpolicy.ops.checks.self_check import self_check
from sglang_patches import registry
from sglang_patches.engine_linears import prepare_linears
from sglang_patches.engine_ranks import rank, row_parallel, shard
from sglang_patches.fusion import HeldBytes, fuse
from sglang_patches.lm_head import use_logits_rule

NORM_TARGET = "sglang.srt.models.transformers.replace_rms_norm_class"
HEAD_TARGET = "sglang.srt.models.transformers.CausalMixin.__init__"
LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install(operators: Operators, contract: NumericsContract, *, fuses: bool) -> None:
    """Hook the model's construction and loading. `fuses`: whether operators may be fused, which is
    not so while each operator is recorded."""

    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        registry.require_active()
        trainers = trainers_model(runner.model.model.config)
        use_cpu_buffers(runner.model.model, trainers)
        if runner.model.logits_processor is not None:
            use_logits_rule(runner.model.logits_processor, trainers)
        align_modules(runner.model, operators, row_parallel(contract))
        hand_on_keywords(runner.model.model)
        registry.report["self_check"] = self_check(operators, contract, longest_prefill())
        joint = fuse(runner, operators) if fuses else []
        prepare_linears(runner.model, contract)
        if held is not None:
            held.take(runner, joint)
        put_in(runner.model, operators, contract)
        return result

    held = HeldBytes(operators) if backend_of(contract.backend).multiplies_bytes else None
    registry.hook(HEAD_TARGET, _add_bias, "after")
    registry.hook(NORM_TARGET, lambda norm, hidden_size: norm, "replace")
    registry.hook(LOAD_TARGET, after_load, "after")


def longest_prefill() -> int:
    """Return the most tokens of one prefill of this engine, as SGLang resolved its flags."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk: int | None = schedule.chunked_prefill_size
    return chunk if chunk and chunk > 0 else int(schedule.max_prefill_tokens)


def put_in(model: Any, operators: Operators, contract: NumericsContract) -> None:
    """Add the contract's adapters, if it has any, beside the linears of a loaded model."""
    add_adapters(model, operators, contract.adapter)
    for adapter in adapters(model):
        for factor in adapter.parameters():
            factor.weight_loader = _load_part  # type: ignore[attr-defined]


def _load_part(factor: torch.Tensor, whole: torch.Tensor) -> None:
    part = shard(whole, factor, rank())
    factor.data[tuple(map(slice, part.shape))].copy_(part)


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


REGISTRY = "sglang.srt.models.registry"
TRANSFORMERS = "transformers"
LEFT_OUT = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's own variable: the last parts of module names to skip."""


def leave_out_models() -> None:
    """Set the variable for this process and its children."""
    spec = find_spec(REGISTRY.rpartition(".")[0])
    assert spec is not None and spec.submodule_search_locations is not None
    names = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    os.environ[LEFT_OUT] = ",".join(name for name in names if name != TRANSFORMERS)
