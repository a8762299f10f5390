"""Megatron's process groups."""

from __future__ import annotations

import torch

from onpolicy.compat import megatron_on_cpu
from onpolicy.errors import ContractError
from onpolicy.train.megatron.layout import MegatronLayout
from onpolicy.train.megatron.version import require_megatron

SEED = 1234
"""The seed of Megatron's generators, which nothing here draws from: there is no dropout."""


def initialize(layout: MegatronLayout) -> None:
    """Make Megatron's groups of the ranks. The layout is checked before.

    Raises ContractError where the layout needs CUDA, there is none, and nothing stands in for it.
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
