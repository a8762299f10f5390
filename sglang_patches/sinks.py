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

TARGET = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"

KNOWN = "triton"
"""A backend that SGLang knows to compute both."""


def install(contract: NumericsContract) -> None:
    """Does nothing for other contracts."""
    if contract.device == "cpu" and any(kind.sinks for kind in contract.shapes.attention):
        registry.hook(TARGET, _as_if_known, "around")


def _as_if_known(original: Any, *args: Any, **kwargs: Any) -> Any:
    # For this check alone: elsewhere the name decides whether SGLang calls Triton.
    from sglang.srt.arg_groups import model_hook

    asked = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda _: (KNOWN, KNOWN)
    try:
        return original(*args, **kwargs)
    finally:
        model_hook.attention_backends_of = asked
