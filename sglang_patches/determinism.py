"""Deterministic inference (`--enable-deterministic-inference`) with the aligned operators.

SGLang's switch gives every request its own sampling seed and log-probabilities from log_softmax, and
FlashAttention one split per sequence, all of which is wanted. It also

- replaces PyTorch's matrix products, log_softmax and mean by Triton kernels of SGLang's for the whole
  process. The aligned operators are in already, and all other operators must stay as in the
  trainer: SGLang's batched product of rotary frequencies and positions would round them to TF32;
- accepts only attention backends of a list and turns the radix cache off for all but a shorter list.
  The aligned attention of the CPU is added to both: it is batch-invariant, with a cached prefix or not.

Source: sglang/srt/arg_groups/attention_hook.py, model_runner.py. Can go when both lists and the
operator set can be chosen by a platform.
"""

from __future__ import annotations

from typing import Any

from onpolicy.contract import NumericsContract
from sglang_patches import registry
from sglang_patches.platform import ATTENTION_BACKEND

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"


def install(contract: NumericsContract) -> None:
    if contract.device == "cpu":
        _accept_cpu_attention()
    registry.hook(TARGET, _keep_aligned_operators, "replace")


def _accept_cpu_attention() -> None:
    from sglang.srt.server_args import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    registry.note("deterministic inference with the aligned attention")


def _keep_aligned_operators(self: Any) -> None:
    """Do nothing: the aligned operators are batch-invariant by construction."""
