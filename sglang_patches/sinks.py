"""Lets SGLang start a model with sinks on our attention backend for CPUs.

SGLang refuses GPT-OSS on `torch_native`, whose place ours has, since that computes neither windows nor
sinks. Ours does. Only servers of such models get this patch; SGLang before 0.5.21 keeps its check
elsewhere, and GPT-OSS on a CPU is refused there.
Source: handle_model_specific_adjustments, sglang/srt/arg_groups/model_hook.py. Can go when that asks
the backend.
"""

from __future__ import annotations

from typing import Any

from onpolicy.contract import NumericsContract
from sglang_patches import registry

CHECK_TARGET = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
BACKENDS_TARGET = "sglang.srt.arg_groups.model_hook.attention_backends_of"

KNOWN = "triton"
"""A backend that SGLang knows to compute both."""


def install(contract: NumericsContract) -> None:
    """Does nothing for other contracts."""
    if contract.device != "cpu" or not any(kind.sinks for kind in contract.shapes.attention):
        return
    checking = False

    def check(original: Any, server_args: Any) -> Any:
        nonlocal checking
        checking = True
        try:
            return original(server_args)
        finally:
            checking = False

    def backends(original: Any, view: Any) -> Any:
        # A hook reaches every module that imported the function; the others must hear the truth.
        return (KNOWN, KNOWN) if checking else original(view)

    registry.hook(CHECK_TARGET, check, "around")
    registry.hook(BACKENDS_TARGET, backends, "around")
