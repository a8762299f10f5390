"""From a run's flags to Megatron as a training engine: checks first, then groups."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from onpolicy.compat import megatron_on_cpu
from onpolicy.config import TrainConfig
from onpolicy.config.groups import MegatronConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.hf_config import load_config
from onpolicy.train import distributed
from onpolicy.train.activations import recomputes_activations
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.version import require_megatron

if TYPE_CHECKING:
    from onpolicy.train.engine import TrainingEngine


def check(config: TrainConfig, hf_config: PretrainedConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if this model cannot be laid out so over the run's ranks; starts nothing."""
    require_megatron()
    _layout(config, hf_config).check(hf_config, contract, config.cluster.num_ranks)


def megatron_engine(config: TrainConfig, contract: NumericsContract) -> TrainingEngine:
    """Make Megatron's groups of the ranks, once; models are loaded into them."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    layout = _layout(config, hf_config)
    layout.check(hf_config, contract, distributed.world_size())
    if not torch.cuda.is_available():
        megatron_on_cpu.activate()
    from megatron.core import parallel_state

    from onpolicy.train.megatron.parallel import initialize
    from onpolicy.train.megatron.sharded_model import MegatronModel

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
        moe_token_dispatcher_type=flags.megatron_moe_dispatcher,
        recompute_activations=recomputes_activations(config.trainer, hf_config),
    )
