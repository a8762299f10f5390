"""Forks the processes of a CPU server from its first one, which has imported everything.

Diverges in stock SGLang: it spawns them, and each imports SGLang, PyTorch and transformers anew, which
is most of what a start costs on a CPU. A GPU's context does not survive a fork, and a data-parallel
controller starts its processes from threads, so both go on spawning.
Source: sglang/srt/entrypoints/engine.py, which sets the method just before it starts them.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from sglang_patches import registry

TARGET = "sglang.srt.entrypoints.engine._set_envs_and_config"


def install() -> None:
    registry.hook(TARGET, _fork, "after")


def _fork(_: Any, server_args: Any) -> None:
    if server_args.dp_size == 1:
        multiprocessing.set_start_method("fork", force=True)
