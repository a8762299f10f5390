"""Lets SGLang start models that it starts on attention backends of its choice only.

For GPT-OSS and for Exaone-4 with windows it asks for another one than `torch_native`, whose place ours
has on a CPU, since that computes neither windows nor sinks. Ours computes both. So these checks are told
of a backend that all of them accept.
Source: handle_model_specific_adjustments, sglang/srt/arg_groups/model_hook.py. Can go when that asks
the backend.
"""

from __future__ import annotations

from typing import Any

from onpolicy.contract import NumericsContract
from sglang_patches import registry

TARGET = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"

ACCEPTED = {"attention_backend": "triton"}


def install(contract: NumericsContract) -> None:
    """Does nothing for GPUs."""
    if contract.device == "cpu":
        registry.hook(TARGET, _as_if_accepted, "around")


def _as_if_accepted(original: Any, *args: Any, **kwargs: Any) -> Any:
    # For these checks alone: elsewhere the name decides whether SGLang calls Triton.
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.overrides import ResolvedView

    resolved_view = model_hook.resolved_view
    model_hook.resolved_view = lambda args: ResolvedView(resolved_view(args), ACCEPTED)
    try:
        return original(*args, **kwargs)
    finally:
        model_hook.resolved_view = resolved_view
