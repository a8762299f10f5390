"""A server and a rank of the trainer on one GPU: whether both fit, before either is started."""

from __future__ import annotations

from collections.abc import Callable
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

SCORER_BYTES = 4
"""For each parameter of a trainer that takes no step: the weight."""

GB = 1e9


RequireSize = Callable[[str, int], None]
"""(a GPU, in words, its bytes) -> nothing; raises ConfigError if it does not hold both sides."""


def require_shareable(config: TrainConfig, contract: NumericsContract) -> None:
    """Raise ConfigError if --colocate has no GPU to share, or one GPU of this host does not hold both
    sides. Those of a cluster are asked when it is known which are shared (`host_memory.fitting`)."""
    if contract.device != "cuda":
        raise ConfigError(
            "--colocate: this machine has no GPU that a server and the trainer could share; on a CPU "
            "they share cores and memory anyway. Leave it out."
        )
    if not config.cluster.ray_address:
        require_size(config, contract)(
            "every GPU", torch.cuda.get_device_properties(0).total_memory
        )


def require_size(config: TrainConfig, contract: NumericsContract) -> RequireSize:
    """What asks of a shared GPU whether it is large enough for a run."""
    stored = stored_shapes(Path(config.model.hf_checkpoint), "--hf-checkpoint").values()
    given = memory_fraction(config.sglang_args)
    sides = {
        "parameters": sum(tensor.numel() for tensor in stored),
        "itemsize": getattr(torch, contract.dtype).itemsize,
        "trainer_bytes": TRAINER_BYTES if config.takes_steps else SCORER_BYTES,
        "ranks": config.cluster.num_ranks,
        "gpus_per_server": tensor_parallel_size(config.sglang_args),
    }
    fraction = COLOCATED_FRACTION if given is None else given
    return lambda gpu, size: require_room(**sides, fraction=fraction, gpu_bytes=size, gpu=gpu)


def require_room(
    *,
    parameters: int,
    itemsize: int,
    trainer_bytes: int = TRAINER_BYTES,
    ranks: int,
    gpus_per_server: int,
    fraction: float,
    gpu_bytes: int,
    gpu: str = "every GPU",
) -> None:
    """Raise ConfigError if what surely lies on `gpu`, of `gpu_bytes`, exceeds either side's part of it.

    That is the server's weights, and what `trainer_bytes` counts. Keys and values, activations and CUDA
    graphs come on top; what they take is not known before a run.
    """
    takes_steps = trainer_bytes > SCORER_BYTES
    kept = ", gradients and optimizer" if takes_steps else ""
    stepless = ", let `onpolicy verify` take no step (--no-step)" if takes_steps else ""
    for side, needed, share, remedy in (
        (
            f"the server's weights ({parameters:,} x {itemsize} bytes / {gpus_per_server} GPUs)",
            parameters * itemsize / gpus_per_server,
            fraction,
            "Raise it, or --sglang-tp-size",
        ),
        (
            f"the trainer's weights{kept} ({parameters:,} x {trainer_bytes} bytes / {ranks} ranks)",
            parameters * trainer_bytes / ranks,
            1 - fraction,
            f"Lower it, start more ranks (--actor-num-gpus-per-node){stepless}",
        ),
    ):
        part = share * gpu_bytes
        if needed > part:
            raise ConfigError(
                f"--colocate, --sglang-mem-fraction-static={fraction:g}: {side} take "
                f"{needed / GB:.1f} GB of {gpu}, and their part of {gpu_bytes / GB:.1f} GB is "
                f"{part / GB:.1f}. {remedy}, or leave --colocate out."
            )
