"""NVIDIA's driver: one that is older than PyTorch's CUDA needs shows it no GPU."""

import functools
import logging
import re
from pathlib import Path

import torch

from onpolicy.config import TrainConfig
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.ops.backends import GPU_BACKENDS

logger = logging.getLogger(__name__)

OLDEST = {"12": 525, "13": 580}
"""Oldest driver for each major version of CUDA. Source: NVIDIA, CUDA Compatibility, minor versions."""

VERSION = Path("/proc/driver/nvidia/version")


def device_of(config: TrainConfig | ServeConfig) -> str:
    """Return where a command computes: "cuda" or "cpu". Raises ConfigError if it asks for GPUs that an
    old driver does not show; a command that asks for nothing is warned."""
    if torch.cuda.is_available():
        return "cuda"
    if problem := old_driver():
        operators = config.operators.operators
        on_gpus = operators in {backend.name for backend in GPU_BACKENDS}
        flags = [f"--operators={operators}"] * on_gpus
        if isinstance(config, TrainConfig):
            gpus = config.cluster.actor_num_gpus_per_node
            flags += ["--colocate"] * config.engine.colocate
            flags += [f"--actor-num-gpus-per-node={gpus}"] * bool(gpus)
        if flags:
            raise ConfigError(f"{flags[0]}: {problem}")
        if operators == "auto":
            _warn(problem)
    return "cpu"


def old_driver() -> str:
    """Return what is wrong with this machine's driver for PyTorch's CUDA, and the remedy; else ""."""
    needed = OLDEST.get((torch.version.cuda or "").partition(".")[0])
    try:
        found = re.search(r"NVRM version:.*?\s(\d+)(?:\.\d+)+", VERSION.read_text())
    except OSError:
        return ""
    if needed is None or found is None or int(found[1]) >= needed:
        return ""
    return (
        f"NVIDIA's driver={found[0].split()[-1]} is too old for PyTorch's CUDA {torch.version.cuda}, "
        f"which sees no GPU with it: {needed} or newer is needed. Install such a driver; or, to compute "
        "on the CPU, the CPU build (`make setup`), and leave out the flags for GPUs."
    )


@functools.cache
def _warn(problem: str) -> None:
    logger.warning("computing on the CPU: %s", problem)
