"""Start of Megatron as a training engine from a run's flags: version and layout first, then groups.

The modules beside this one depend on the internals of one version of Megatron-core.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from onpolicy.compat import megatron_on_cpu
from onpolicy.config import TrainConfig
from onpolicy.config.groups import MegatronConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import head_dim
from onpolicy.ops.backends import backend_of
from onpolicy.ops.backends.base import FP8_BLOCK
from onpolicy.training import distributed
from onpolicy.training.engine import recomputes_activations
from onpolicy.training.megatron.rank_layout import MegatronLayout

if TYPE_CHECKING:
    from onpolicy.training.engine import TrainingEngine


MEGATRON_CORE = "0.16.1"

_REMEDY = (
    f"Install it without its dependencies, which onpolicy brings: pip install --no-deps "
    f"megatron-core=={MEGATRON_CORE}. Or use --train-backend fsdp."
)

SEED = 1234
"""Seed of Megatron's generators, which are unused, since there is no dropout."""


def require_megatron() -> None:
    """Raise ConfigError if megatron-core is missing or has another version."""
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--train-backend megatron: megatron-core is not installed. {_REMEDY}"
        ) from error
    if installed != MEGATRON_CORE:
        raise ConfigError(
            f"--train-backend megatron: megatron-core=={installed} is installed, and this version of "
            f"onpolicy replaces internals of {MEGATRON_CORE}. {_REMEDY}"
        )


def _require_blocks_of_heads(operators: str, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if scale blocks would cross heads: queries, keys and values are one weight,
    head by head."""
    size = head_dim(hf_config)
    if operators != "auto" and backend_of(operators).multiplies_bytes and size % FP8_BLOCK:
        raise ConfigError(
            f"--operators={operators}: head_dim={size}, and with --train-backend megatron it must "
            f"be a multiple of the {FP8_BLOCK} rows that share a scale. Use --train-backend fsdp, or "
            "--operators hopper."
        )


def check(config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if the run's ranks do not support this model and layout; starts nothing."""
    require_megatron()
    _require_blocks_of_heads(config.operators.operators, hf_config)
    _layout(config, hf_config).check(hf_config, contract, config.cluster.num_ranks)


def megatron_engine(config: TrainConfig, contract: NumericsContract) -> TrainingEngine:
    """Make Megatron's groups of the ranks, once, and return the engine that loads models into them."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    layout = _layout(config, hf_config)
    layout.check(hf_config, contract, distributed.world_size())
    if not torch.cuda.is_available():
        megatron_on_cpu.activate()
    from megatron.core import parallel_state

    from onpolicy.training.megatron.megatron_model import MegatronModel

    if not parallel_state.model_parallel_is_initialized():
        initialize(layout)
    distributed.use_data_group(parallel_state.get_data_parallel_group())
    return partial(MegatronModel, config, contract, layout)


def _layout(config: TrainConfig, hf_config: PretrainedConfig) -> MegatronLayout:
    flags: MegatronConfig = config.megatron
    return MegatronLayout(
        tensor_model_parallel_size=flags.megatron_tp,
        pipeline_model_parallel_size=flags.megatron_pp,
        context_parallel_size=flags.megatron_cp,
        expert_model_parallel_size=flags.megatron_ep,
        sequence_parallel=flags.megatron_sequence_parallel,
        recompute_activations=recomputes_activations(config.trainer, hf_config),
    )


def initialize(layout: MegatronLayout) -> None:
    """Make Megatron's groups of the ranks, for a checked layout.

    Raises ContractError if the layout needs CUDA and there is neither CUDA nor its stand-in.
    """
    require_megatron()
    if layout.needs_cuda_names and not (torch.cuda.is_available() or megatron_on_cpu.is_active()):
        raise ContractError(
            "torch.cuda.is_available()=False: Megatron's own code for this layout names CUDA. Call "
            "onpolicy.compat.megatron_on_cpu.activate() first."
        )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.tensor_model_parallel_size,
    )
    model_parallel_cuda_manual_seed(SEED, inference_rng_tracker=True)
