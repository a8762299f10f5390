"""Alignment and check of the Hugging Face model that SGLang runs.

SGLang's transformers backend swaps every `*RMSNorm` for its own. The swap is prevented, so that
both engines hold the same Hugging Face modules, and both then get the same replacements from
`onpolicy.models.align`. When the model is loaded, the operators are run at the model's shapes and
their digest is reported.

Source: replace_rms_norm_class, sglang/srt/models/transformers.py. Can go when the backend lets a
caller keep HF modules.
"""

from __future__ import annotations

from typing import Any

from onpolicy.contract import NumericsContract
from onpolicy.models.align import align_modules
from onpolicy.models.layers import hand_on_keywords
from onpolicy.ops import Operators
from onpolicy.ops.backends import backend_of
from onpolicy.ops.checks.self_check import self_check
from sglang_patches import adapters, registry
from sglang_patches.fusion import fuse
from sglang_patches.held_bytes import HeldBytes
from sglang_patches.linear import prepare_linears
from sglang_patches.tensor_parallel import row_parallel

NORM_TARGET = "sglang.srt.models.transformers.replace_rms_norm_class"
LOAD_TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def install(operators: Operators, contract: NumericsContract, *, fuses: bool) -> None:
    """Hook the model's construction and loading. `fuses`: whether operators may be fused, which is
    not so while each operator is recorded."""

    def after_load(result: Any, runner: Any, *_: Any, **__: Any) -> Any:
        registry.require_active()
        align_modules(runner.model, operators, row_parallel(contract))
        hand_on_keywords(runner.model.model)
        registry.report["self_check"] = self_check(operators, contract, longest_prefill())
        joint = fuse(runner, operators) if fuses else []
        prepare_linears(runner.model, contract)
        if held is not None:
            held.take(runner, joint)
        adapters.put_in(runner.model, operators, contract)
        return result

    held = HeldBytes(operators) if backend_of(contract.backend).multiplies_bytes else None
    registry.hook(NORM_TARGET, lambda norm, hidden_size: norm, "replace")
    registry.hook(LOAD_TARGET, after_load, "after")


def longest_prefill() -> int:
    """Return the most tokens of one prefill of this engine, as SGLang resolved its flags."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk: int | None = schedule.chunked_prefill_size
    return chunk if chunk and chunk > 0 else int(schedule.max_prefill_tokens)
