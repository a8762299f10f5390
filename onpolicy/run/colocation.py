"""A server and a rank of the trainer on one GPU: whether both fit, before either is started."""

from __future__ import annotations

from pathlib import Path

import torch

from onpolicy.config import TrainConfig
from onpolicy.config.sglang_flags import memory_fraction, tensor_parallel_size
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import stored_shapes
from onpolicy.rollout.engine_args import COLOCATED_FRACTION

TRAINER_BYTES = 16
"""For each parameter, in float32: the weight, its gradient, and the two moments of AdamW."""

GB = 1e9


def require_shareable(config: TrainConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if --colocate has no GPU to share, or one GPU does not hold both sides."""
    if contract.device != "cuda":
        raise ConfigError(
            "--colocate: this machine has no GPU that a server and the trainer could share; on a CPU "
            "they share cores and memory anyway. Leave it out."
        )
    stored = stored_shapes(Path(config.model.hf_checkpoint), "--hf-checkpoint").values()
    given = memory_fraction(config.sglang_args)
    require_room(
        parameters=sum(tensor.numel() for tensor in stored),
        itemsize=getattr(torch, contract.dtype).itemsize,
        ranks=config.cluster.num_ranks,
        gpus_per_server=tensor_parallel_size(config.sglang_args),
        fraction=COLOCATED_FRACTION if given is None else given,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory,
    )


def require_room(
    *,
    parameters: int,
    itemsize: int,
    ranks: int,
    gpus_per_server: int,
    fraction: float,
    gpu_bytes: int,
) -> None:
    """Raise ConfigError if what surely lies on a GPU exceeds either side's part of it.

    That is the server's weights, and what TRAINER_BYTES counts. Keys and values, activations and CUDA
    graphs come on top; what they take is not known before a run.
    """
    for side, needed, share, remedy in (
        (
            f"the server's weights ({parameters:,} x {itemsize} bytes / {gpus_per_server} GPUs)",
            parameters * itemsize / gpus_per_server,
            fraction,
            "Raise it, or --sglang-tp-size",
        ),
        (
            f"the trainer's weights, gradients and optimizer ({parameters:,} x {TRAINER_BYTES} bytes / "
            f"{ranks} ranks)",
            parameters * TRAINER_BYTES / ranks,
            1 - fraction,
            "Lower it, or start more ranks (--actor-num-gpus-per-node)",
        ),
    ):
        part = share * gpu_bytes
        if needed > part:
            raise ConfigError(
                f"--colocate, --sglang-mem-fraction-static={fraction:g}: {side} take "
                f"{needed / GB:.1f} GB of every GPU, and their part of {gpu_bytes / GB:.1f} GB is "
                f"{part / GB:.1f}. {remedy}, or leave --colocate out."
            )
