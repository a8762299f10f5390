"""NVIDIA's driver: one that is older than PyTorch's CUDA needs shows it no GPU."""

from __future__ import annotations

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
"""Oldest driver branch by the major version of CUDA. Source: NVIDIA, CUDA Compatibility, minor version
compatibility."""

VERSION = Path("/proc/driver/nvidia/version")
"""File of the kernel module, which tells its version without CUDA."""


def device_of(config: TrainConfig | ServeConfig) -> str:
    """Return where a command computes: "cuda" or "cpu". Raises ConfigError if it asks for GPUs that an
    old driver does not show; one that asks for neither is warned."""
    if torch.cuda.is_available():
        return "cuda"
    if problem := old_driver():
        operators = config.operators.operators
        asked = {f"--operators={operators}": operators in {each.name for each in GPU_BACKENDS}}
        if isinstance(config, TrainConfig):
            gpus = config.cluster.actor_num_gpus_per_node
            asked |= {"--colocate": config.engine.colocate}
            asked |= {f"--actor-num-gpus-per-node={gpus}": gpus is not None}
        if flag := next((flag for flag, is_asked in asked.items() if is_asked), None):
            raise ConfigError(f"{flag}: {problem}")
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
