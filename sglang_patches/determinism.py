"""Makes `--enable-deterministic-inference` work with the aligned CPU operators.

SGLang's switch gives every request its own sampling seed and log-probabilities from log_softmax,
which is what reproducible runs need. It also (a) accepts only attention backends of a list and
turns the radix cache off for all but a shorter list, and (b) installs its Triton batch-invariant
operators, which need an accelerator. The aligned attention is batch-invariant, with a cached prefix
or without, and the aligned operators are in already.
Source: sglang/srt/arg_groups/attention_hook.py, model_runner.py. Can go when both lists and the
operator set can be chosen by a platform.
"""

from __future__ import annotations

from typing import Any

from sglang_patches import registry
from sglang_patches.platform import ATTENTION_BACKEND

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"


def install() -> None:
    from sglang.srt.server_args import (
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    registry.note("deterministic inference with the aligned attention")
    registry.hook(TARGET, _keep_aligned_operators, "replace")


def _keep_aligned_operators(self: Any) -> None:
    """The aligned operators are batch-invariant by construction; nothing to enable."""
