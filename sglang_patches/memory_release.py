"""Synchronisation of a server with its GPU before it releases memory.

Stock SGLang copies buffers and unmaps their source, and synchronises afterwards. A copy that is
still under way then ends in an illegal memory access, which killed a server on an H100 that eight
shared, in one of some 40 releases.

Source: sglang/srt/managers/scheduler_components/weight_updater.py (`release_memory_occupation`),
pull request 37932 of sgl-project/sglang. Can go when the oldest supported SGLang synchronises
itself.
"""

from __future__ import annotations

import torch

from sglang_patches import registry

TARGET = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.pause"


def install() -> None:
    registry.hook(TARGET, _wait, "before")


def _wait(*_: object) -> None:
    torch.cuda.synchronize()
