"""From what a user asks for to the numerics contract that every engine of a command keeps."""

from __future__ import annotations

import logging
import os

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig
from onpolicy.config.sglang_flags import tensor_parallel_size
from onpolicy.config.tools import ServeConfig
from onpolicy.contract import NumericsContract
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import require_alignable
from onpolicy.models.policy import operator_shapes
from onpolicy.models.tensor_parallel import require_shardable
from onpolicy.ops.capability import choose_backend
from onpolicy.ops.environment import require_exact
from onpolicy.ops.machine import Machine

logger = logging.getLogger(__name__)


def contract_for(
    config: TrainConfig | ServeConfig, hf_config: PretrainedConfig, *, aligned: bool
) -> NumericsContract:
    """The contract of a model on this machine, on aligned operators or on stock ones.

    Raises ConfigError if the model, the machine or the environment cannot keep it.
    """
    model, blocks = config.model, config.count_row_parallel_blocks()
    facts = ModelFacts(hf_config, model.trust_remote_code)
    if aligned:
        require_alignable(facts, hf_config.max_position_embeddings)
        require_exact(os.environ)
    shapes = operator_shapes(facts, blocks)
    backend = "stock"
    if aligned:
        tp_size = tensor_parallel_size(config.sglang_args)
        require_shardable(facts, shapes, tp_size=tp_size, blocks=blocks)
        asked = config.operators.operators
        backend = choose_backend(asked, model.dtype, shapes, blocks, Machine.here())
        logger.info("aligned operators: %s, %s", backend, model.dtype)
    return NumericsContract(
        backend=backend,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=model.dtype,
        shapes=shapes,
        row_parallel_blocks=blocks,
    )
