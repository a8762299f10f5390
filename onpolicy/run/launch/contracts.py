"""The numerics contract of all engines of a command, with its adapters, from the command's flags."""

import copy
import logging
import os

from torch import nn
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.groups.engine_flags import ServerConfig
from onpolicy.config.sglang_flags import context_length, tensor_parallel_size
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.contract import AdapterShape, NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.images.family import ImageFamily
from onpolicy.models.expert_layers import expert_names
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable, require_sequences_apart
from onpolicy.models.llama4 import require_context
from onpolicy.models.lora.adapters import target_names, with_adapters
from onpolicy.models.lora.peft_adapter import read_peft_adapter
from onpolicy.models.lora.peft_format import FUSED_NAMES, require_adapter_fits
from onpolicy.models.rotary_factors import choose_factors, follows_context
from onpolicy.models.size import operator_shapes
from onpolicy.models.stored import stored_tensors
from onpolicy.models.tensor_parallel import require_shardable, row_parallel_linears
from onpolicy.ops.backends import backend_of, choose_backend
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.ops.machine import Machine
from onpolicy.ops.refused_environment import require_exact, require_ours
from onpolicy.run.launch.gpu_driver import device_of
from onpolicy.weights.rounding import is_rounded

logger = logging.getLogger(__name__)


def contract_for(
    config: TrainConfig | ServeConfig, hf_config: PretrainedConfig, *, aligned: bool
) -> NumericsContract:
    """Return the contract of a model on this machine, with aligned or stock operators. Raises
    ConfigError if the model, the machine or the environment cannot keep it."""
    require_ours(os.environ)
    device = device_of(config)
    model, blocks = config.model, config.plan.row_parallel_blocks
    facts = ModelFacts(hf_config, model.trust_remote_code)
    context = context_length(config.sglang_args) or hf_config.max_position_embeddings
    require_context(hf_config, context)
    if aligned:
        require_alignable(facts, context)
        require_exact(os.environ)
    elif isinstance(config, TrainConfig):
        require_sequences_apart(hf_config)
    adapter = adapter_of(config, facts) if isinstance(config, TrainConfig) else None
    shapes, backend = operator_shapes(facts, blocks), "stock"
    if aligned:
        shapes = with_adapters(shapes, facts.model, adapter, blocks)
        tp_size = tensor_parallel_size(config.sglang_args)
        require_shardable(facts, shapes, tp_size=tp_size, blocks=blocks)
        asked = config.operators.operators
        backend = choose_backend(asked, model.dtype, shapes, blocks, Machine.here())
        logger.info("aligned operators: %s, %s", backend, model.dtype)
    weight_format = rollout_format(config) if aligned else ""
    if weight_format:
        require_roundable(facts, weight_format)
    activation_format = _servers(config).rollout_activation_format
    if backend_of(backend).multiplies_bytes:
        require_bytes(facts, backend, (weight_format, activation_format), blocks)
    return NumericsContract(
        backend=backend,
        weight_format=weight_format,
        activation_format=activation_format,
        device=device,
        dtype=model.dtype,
        shapes=shapes,
        row_parallel_blocks=blocks,
        context=_deciding(context, hf_config),
        adapter=adapter,
        images=ImageFamily.of(model.hf_checkpoint).model_type if model.images else "",
    )


def adapter_of(config: TrainConfig, facts: ModelFacts) -> AdapterShape | None:
    """Return the shape of the adapters that a run trains, or None if all weights are trained.
    Raises ConfigError for linears that the model does not have, or that cannot be adapted."""
    if not config.lora.lora_rank:
        return None
    rank, asked = config.lora.lora_rank, config.lora.lora_target_modules
    targets = target_names(facts.model, asked)
    alike = FUSED_NAMES.intersection(targets)
    experts = expert_names(facts.model)
    if alike and experts and not experts.intersection(targets):
        raise ConfigError(
            f"--lora-target-modules={asked}: PEFT takes {', '.join(sorted(alike))} of a mixture for its "
            "experts, so it could not read the adapter. Name the experts too, or none of these."
        )
    if given := config.lora.lora_adapter:
        adapter = read_peft_adapter(given, "--lora-adapter")
        require_adapter_fits(adapter, facts.model, config.model.hf_checkpoint, "--lora-adapter")
    return AdapterShape(rank=rank, scale=config.lora.scale, targets=targets)


def rollout_format(config: TrainConfig | ServeConfig) -> str:
    """Return --rollout-weight-format if both engines compute with it, else ""."""
    plan = config.plan
    is_of_both = plan.starts_aligned and not plan.is_governed
    return _servers(config).rollout_weight_format if is_of_both else ""


def _servers(config: TrainConfig | ServeConfig) -> ServerConfig:
    return config.server if isinstance(config, ServeConfig) else config.engine


def require_roundable(facts: ModelFacts, weight_format: str) -> None:
    """Raise ConfigError if the checkpoint stores weights of linears in tensors that are no matrices."""
    for name, parameter in facts.model.named_parameters():
        for stored, tensor in stored_tensors(facts.model, name, parameter).items():
            if tensor.dim() == 3 and not stored.endswith("conv1d.weight"):
                raise ConfigError(
                    f"--rollout-weight-format={weight_format}: the checkpoint has all experts of a "
                    f"layer in one tensor ({stored}), and only matrices are rounded. Leave the flag out."
                )


def require_bytes(
    facts: ModelFacts, backend: str, formats: tuple[str, str], row_parallel_blocks: int
) -> None:
    """Raise ConfigError if the formats are not FP8, or if a rank would hold part of a block."""
    if formats != ("fp8_e4m3_block128", "fp8_e4m3"):
        raise ConfigError(
            f"--operators={backend}: multiplies bytes of weights and inputs that both engines round. "
            "Add --rollout-weight-format fp8_e4m3_block128 and --rollout-activation-format fp8_e4m3, or "
            "choose --operators hopper."
        )
    shared = row_parallel_linears(facts.model)
    for name, linear in facts.model.named_modules():
        if not isinstance(linear, nn.Linear) or not is_rounded(f"{name}.weight", linear.weight):
            continue
        over = (1, row_parallel_blocks) if linear in shared else (row_parallel_blocks, 1)
        for kind, size, ranks in zip(("output", "input"), linear.weight.shape, over, strict=True):
            if size % (FP8_BLOCK * ranks):
                whose = f" on each of up to {ranks} tensor-parallel ranks" if ranks > 1 else ""
                raise ConfigError(
                    f"--operators={backend}: {name} has {size} {kind} channels, and {FP8_BLOCK} "
                    f"share a scale{whose}, so they must be a multiple of {FP8_BLOCK * ranks}. Choose "
                    "--operators hopper, which multiplies what bytes and scales come to."
                )


def _deciding(context: int, hf_config: PretrainedConfig) -> int | None:
    """Return `context` if the model's rotary angles depend on it, else None."""
    if not follows_context(hf_config):
        return None
    for chosen in choose_factors(copy.deepcopy(hf_config), context):
        logger.info(
            "rotary embedding: %s, for the %d tokens that the engine serves; another choice is "
            "--sglang-context-length",
            *(chosen, context),
        )
    return context
